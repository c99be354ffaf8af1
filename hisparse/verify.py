"""`hisparse verify`: runs the item copy and the swap-in on this machine's device, and compares every byte.

What should come out is computed by NumPy, from the ops' contract. The report can be pasted into an issue: it names the
device, the versions and the first difference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import hisparse
import hisparse.cpu
from hisparse import _C
from hisparse.arrays import Arrays, NumpyArrays, TorchArrays
from hisparse.info import describe, versions
from hisparse.progress import progress

SUMMARY = "check copy and swap-in byte for byte on this machine's device"

_GUARD_BYTES = 64
_MOST_DIFFERENCES_SHOWN = 5
_CPU_MODES = {
    "wave 64": {"warp_size": 64, "item_copy": "wave"},
    "wave 32": {"warp_size": 32, "item_copy": "wave"},
    "chunk 32": {"warp_size": 32, "item_copy": "chunk"},
}
_MODEL_ITEMS = (512, 576, 584, 656, 1024, 1152)


@dataclass
class Tally:
    calls: int = 0
    items: int = 0
    bytes: int = 0


@dataclass
class Report:
    device: str
    driver: str
    versions: dict[str, str | None]
    seed: int
    fallback: str | None = None  # why it is the CPU target, where nobody asked for it
    copy: Tally = field(default_factory=Tally)
    swap_in: Tally = field(default_factory=Tally)
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.differences


@dataclass(frozen=True)
class SwapInSize:
    num_top_k: int
    hot_buffer_size: int
    batch: int
    item_size_bytes: int
    steps: int
    block_size: int = 256

    def __str__(self) -> str:
        return (
            f"swap-in K={self.num_top_k} H={self.hot_buffer_size} B={self.batch} item={self.item_size_bytes} "
            f"block={self.block_size}"
        )


def first_difference(what: str, got: np.ndarray, expected: np.ndarray) -> str | None:
    if np.array_equal(got, expected):
        return None
    places = np.argwhere(got != expected)
    at = tuple(places[0].tolist())
    return f"{what}: {len(places)} of {got.size} differ, the first at {list(at)}: {got[at]}, expected {expected[at]}"


# ---- item copy


def copy_sizes(quick: bool) -> list[int]:
    if quick:
        return [1, 3, 8, 16, 24, 31, 100, *_MODEL_ITEMS, 4096]
    around = (size + delta for size in (64, 128, 256, 512, 1024, 2048, 4096) for delta in (-16, -8, -1, 0, 1, 8, 16))
    return sorted({*range(1, 49), *around, *_MODEL_ITEMS})


def check_copy(
    arrays: Arrays, rng: np.random.Generator, tally: Tally, item: int, leads: tuple[int, int], way: str
) -> Iterator[str]:
    """Copies items between two pools that lie among other bytes, `leads` bytes off an aligned address."""
    rows = 40
    raws = [rng.integers(0, 256, 2 * _GUARD_BYTES + lead + rows * item, dtype=np.uint8) for lead in leads]
    spans = [slice(_GUARD_BYTES + lead, _GUARD_BYTES + lead + rows * item) for lead in leads]
    src_indices, dst_indices = rng.permutation(rows), rng.permutation(rows)
    src_indices[::13], dst_indices[5::13] = -1, -1  # skipped
    keep = (src_indices >= 0) & (dst_indices >= 0)
    places = {"host": arrays.on_host, "device": arrays.on_device}
    source, destination = (places[place](raw) for place, raw in zip(way.split(" to "), raws, strict=True))
    indices = (arrays.on_device(array) for array in (src_indices, dst_indices))
    hisparse.copy_items(source[spans[0]], destination[spans[1]], *indices, item)

    expected = raws[1].copy()
    items = expected[spans[1]].reshape(rows, item)
    items[dst_indices[keep]] = raws[0][spans[0]].reshape(rows, item)[src_indices[keep]]
    tally.calls += 1
    tally.items += int(keep.sum())
    tally.bytes += int(keep.sum()) * item
    if difference := first_difference("bytes", arrays.to_numpy(destination), expected):
        yield f"copy of {item}-byte items, {way}, {leads[0]} and {leads[1]} bytes off alignment: {difference}"


# ---- swap-in


def swap_in_sizes(quick: bool) -> list[SwapInSize]:
    small = [
        SwapInSize(1, 1, 1, 16, 4),
        SwapInSize(5, 8, 3, 24, 8),
        SwapInSize(64, 100, 4, 584, 6, 64),
        SwapInSize(96, 128, 2, 7, 6, 512),
        SwapInSize(512, 1024, 4, 512, 4, 1024),
        SwapInSize(2048, 4096, 2, 656, 2, 1024),
    ]
    if quick:
        return small
    shapes = [(100, 333), (256, 256), (512, 2048), (1000, 1111), (2048, 2048), (2048, 4096), (2048, 8192)]
    sizes = [
        SwapInSize(top_k, slots, batch, item, 3, 1024 if slots > 1000 else 256)
        for (top_k, slots), batch, item in itertools.product(shapes, (1, 5), _MODEL_ITEMS)
    ]
    return small + sizes


def expected_row(
    top_k: np.ndarray, tokens: np.ndarray, lru: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One row of the op, from its contract: slot of each entry or -1, missing tokens, the slots they take, new LRU."""
    slots, newest = len(lru), length - 1
    valid = (top_k >= 0) & (top_k < length)
    if length <= slots:
        nothing = np.empty(0, np.int64)
        return np.where(valid, top_k, -1), nothing, nothing, lru
    slot_of = np.full(length, -1)
    held = np.flatnonzero((tokens >= 0) & (tokens < newest))
    slot_of[tokens[held]] = held
    asked, first = np.unique(top_k[valid & (top_k != newest)], return_index=True)
    asked = asked[np.argsort(first)]
    missing = asked[slot_of[asked] < 0]
    is_free = ~np.isin(lru, slot_of[asked])
    free = lru[is_free]
    taken = free[: len(missing)]
    slot_of[missing], slot_of[newest] = taken, slots
    output = np.where(valid, slot_of[np.where(valid, top_k, 0)], -1)
    return output, missing, taken, np.concatenate([free[len(missing) :], taken, lru[~is_free]])


class SwapInRun:
    """A few steps of decoding from a random state, in which hits, misses, duplicates and unused entries occur."""

    def __init__(self, arrays: Arrays, rng: np.random.Generator, size: SwapInSize):
        self.rng, self.size = rng, size
        slots, batch, item = size.hot_buffer_size, size.batch, size.item_size_bytes
        requests = batch + 2
        # Every third row is shorter than its hot buffer.
        self.lengths = np.where(np.arange(batch) % 3 == 2, max(1, slots // 2), slots + rng.integers(1, 2 * slots + 9))
        most = int(self.lengths.max()) + size.steps
        state = {
            "device_buffer_tokens": np.full((requests, slots + 1), -1, np.int32),
            "host_cache_locs": rng.permutation(requests * most).reshape(requests, most),
            "device_buffer_locs": rng.permutation(requests * (slots + 1)).reshape(requests, -1).astype(np.int32),
            "host_cache": rng.integers(0, 256, (requests * most, item), dtype=np.uint8),
            "device_buffer": rng.integers(0, 256, (requests * (slots + 1), item), dtype=np.uint8),
            "req_pool_indices": rng.permutation(requests)[:batch],
            "lru_slots": rng.permuted(np.tile(np.arange(slots, dtype=np.int16), (requests, 1)), axis=1),
        }
        for rid, length in zip(state["req_pool_indices"], self.lengths, strict=True):
            resident = rng.permutation(int(length) - 1)[: slots * 3 // 4]
            state["device_buffer_tokens"][rid, rng.permutation(slots)[: len(resident)]] = resident
        self.state = state
        self.arrays = arrays
        self.live = {
            name: arrays.on_host(array) if name == "host_cache" else arrays.on_device(array)
            for name, array in state.items()
        }

    def selection(self) -> np.ndarray:
        size, batch = self.size, self.size.batch
        top_k = np.full((batch, size.num_top_k), -1, np.int32)
        for row, length in zip(top_k, self.lengths, strict=True):
            count = min(size.num_top_k, int(length))
            row[:count] = self.rng.permutation(int(length))[:count]
            self.rng.shuffle(row)
            row[1 :: max(2, size.num_top_k // 7)] = -1
            row[-1] = row[len(row) // 2]
        return top_k

    def step(self, tally: Tally) -> Iterator[str]:
        size, state, arrays = self.size, self.state, self.arrays
        top_k = self.selection()
        plan = {
            "miss_src": np.zeros(top_k.shape, np.int64),
            "miss_dst": np.zeros(top_k.shape, np.int32),
            "miss_count": np.full(size.batch, -7, np.int32),
        }
        outputs = plan | {"top_k_device_locs": np.full(top_k.shape, 123456, np.int32)}
        live_outputs = {name: arrays.on_device(array) for name, array in outputs.items()}
        # One row of a larger batch is padding, and stays out of it.
        real = size.batch if size.batch < 4 else size.batch - 1
        hisparse.load_cache_to_device_buffer_mla(
            top_k_tokens=arrays.on_device(top_k),
            seq_lens=arrays.on_device(self.lengths.astype(np.int32)),
            item_size_bytes=size.item_size_bytes,
            num_top_k=size.num_top_k,
            hot_buffer_size=size.hot_buffer_size,
            block_size=size.block_size,
            num_real_reqs=arrays.on_device(np.array([real], np.int32)),
            **self.live,
            **live_outputs,
        )

        expected = {name: array.copy() for name, array in outputs.items()}
        expected["top_k_device_locs"][real:] = -1
        for b in range(real):
            self.expect_row(b, top_k[b], expected)
            tally.items += int(expected["miss_count"][b])
            tally.bytes += int(expected["miss_count"][b]) * size.item_size_bytes
        tally.calls += 1
        got = {name: arrays.to_numpy(array) for name, array in (self.live | live_outputs).items()}
        for b, count in enumerate(expected["miss_count"]):  # entries from the count on are unspecified
            for name in ("miss_src", "miss_dst"):
                got[name][b, max(count, 0) :] = expected[name][b, max(count, 0) :]
        for name, array in (state | expected).items():
            if difference := first_difference(name, got[name], array):
                yield f"{size}: {difference}"
        self.lengths = self.lengths + 1

    def expect_row(self, b: int, top_k: np.ndarray, expected: dict[str, np.ndarray]) -> None:
        state, rid = self.state, self.state["req_pool_indices"][b]
        tokens, locs = state["device_buffer_tokens"][rid], state["device_buffer_locs"][rid]
        row, missing, taken, lru = expected_row(top_k, tokens[:-1], state["lru_slots"][rid], int(self.lengths[b]))
        expected["top_k_device_locs"][b] = np.where(row >= 0, locs[row], -1)
        sources, targets = state["host_cache_locs"][rid, missing], locs[taken]
        expected["miss_count"][b] = len(missing)
        expected["miss_src"][b, : len(missing)] = sources
        expected["miss_dst"][b, : len(missing)] = targets
        tokens[taken] = missing
        state["lru_slots"][rid] = lru
        state["device_buffer"][targets] = state["host_cache"][sources]


def check_swap_in(arrays: Arrays, rng: np.random.Generator, tally: Tally, size: SwapInSize) -> Iterator[str]:
    decoding = SwapInRun(arrays, rng, size)
    for _ in range(size.steps):
        yield from decoding.step(tally)


# ---- the command

Check = Callable[[Arrays, np.random.Generator], Iterator[str]]


def checks(report: Report, quick: bool) -> list[Check]:
    ways = ("host to device", "device to host", "device to device")
    leads = ((0, 0), (8, 0), (4, 12)) if quick else ((0, 0), (8, 0), (0, 8), (4, 12), (1, 0), (3, 5))
    copies: list[Check] = [
        partial(check_copy, tally=report.copy, item=item, leads=lead, way=way)
        for item, lead, way in itertools.product(copy_sizes(quick), leads, ways)
    ]
    return copies + [partial(check_swap_in, tally=report.swap_in, size=size) for size in swap_in_sizes(quick)]


def verify(device: str = "cpu", quick: bool = False, seed: int = 0) -> Report:
    """Checks the item copy and the swap-in on a device: "cpu", the CPU target in each of its modes, "cuda" or "cuda:1".

    Raises:
        RuntimeError: torch finds no such device, or is not installed.
    """
    arrays, modes = _device(device)
    target, info = _found(device)
    driver = f"{target['library']}, version {target['driver_version'] or 'unknown'}" if target["library"] else "none"
    name = describe(info) if info else target["unavailable"] or device
    if device == "cpu":
        name = f"CPU target, {', '.join(modes)}"
    report = Report(name, driver, versions(), seed)
    started = time.perf_counter()
    for mode, options in modes.items():
        rng = np.random.default_rng(seed)
        with options:
            for check in progress(checks(report, quick), mode):
                report.differences += [f"{mode}: {difference}" for difference in _run(check, arrays, rng)]
    report.seconds = time.perf_counter() - started
    return report


def _device(device: str) -> tuple[Arrays, dict[str, AbstractContextManager[Any]]]:
    if device == "cpu":
        return NumpyArrays(), {name: hisparse.cpu.options(**mode) for name, mode in _CPU_MODES.items()}
    arrays = TorchArrays()
    import torch

    return arrays, {device: torch.cuda.device(_index(device))}


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _found(device: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What the extension says of the device, and of its target."""
    name = "cpu"
    if device != "cpu":
        import torch

        name = "rocm" if torch.version.hip else "cuda"
    (target,) = (target for target in _C.targets() if target["target"] == name)
    return dict(target), next((dict(info) for info in target["devices"] if info["index"] == _index(device)), None)


def _run(check: Check, arrays: Arrays, rng: np.random.Generator) -> list[str]:
    try:
        return list(check(arrays, rng))
    except (RuntimeError, ValueError) as error:
        return [f"{check.keywords}: {type(error).__name__}: {error}"]


def lines(report: Report) -> Iterator[str]:
    yield f"hisparse verify {hisparse.__version__}, seed {report.seed}"
    yield f"device    {report.device}"
    if report.fallback:
        yield f"          since {report.fallback}"
    yield f"driver    {report.driver}"
    yield "software  " + ", ".join(f"{name} {version or 'not installed'}" for name, version in report.versions.items())
    build = hisparse.build_info()
    yield "build     " + "; ".join((" ".join(build["cuda_archs"] + build["rocm_archs"]) or "cpu", build["compiler"]))
    for name, tally in {"copy": report.copy, "swap-in": report.swap_in}.items():
        yield f"{name:<9} {tally.calls:,} calls, {tally.items:,} items copied, {tally.bytes / 1e6:,.1f} MB"
    for difference in report.differences[:_MOST_DIFFERENCES_SHOWN]:
        yield f"  {difference}"
    if report.passed:
        yield f"PASS in {report.seconds:.1f} s: every table and every byte is as it should be."
    else:
        yield f"FAIL in {report.seconds:.1f} s: {len(report.differences)} differences."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda or cuda:N, also on ROCm (a GPU where torch finds one, else cpu)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes: seconds, even on the CPU target")
    parser.add_argument("--seed", type=int, default=0, help="of states and selections (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE as well")


def default_device() -> tuple[str, str | None]:
    """A GPU, or else the CPU target and why it is that."""
    try:
        import torch
    except ImportError:
        return "cpu", "torch, through which GPUs are checked, is not installed"
    return ("cuda", None) if torch.cuda.is_available() else ("cpu", "torch finds no GPU")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    device, fallback = (args.device, None) if args.device else default_device()
    name, _, index = device.partition(":")
    if name not in ("cpu", "cuda") or (index and not (name == "cuda" and index.isdecimal())):
        parser.error(f"argument --device: must be cpu, cuda or cuda:N, got {device}")
    if args.seed < 0:
        parser.error(f"argument --seed: must be at least 0, got {args.seed}")
    try:
        report = verify(device, args.quick, args.seed)
    except RuntimeError as error:
        parser.error(str(error))
    report.fallback = fallback
    print("\n".join(lines(report)))
    if args.json:
        args.json.write_text(json.dumps(asdict(report) | {"passed": report.passed}, indent=2) + "\n")
    return 0 if report.passed else 1
