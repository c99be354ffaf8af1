"""`hisparse demo`: sparse attention over a KV cache that lives in host memory, on real text, checked byte for byte.

A batch of requests decodes the shipped play word by word, out of a `hisparse.HotBufferCache`. In every step each
request picks the `top_k` positions with the highest scores q.k, the op swaps their items into the request's hot buffer,
and attention runs over the device slots that it names. The same attention over a full cache, at the same positions in
the same order, has to give the same bits.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import hisparse
import hisparse.cpu
from hisparse.arrays import Array, Arrays, NumpyArrays, TorchArrays
from hisparse.decode import DecodeBatch, Request
from hisparse.progress import progress
from hisparse.text_items import ITEM_WIDTH, KEY_WIDTH, Projection, Words, load_text

SUMMARY = "decode real text with the KV cache in host memory, and check every step"

_SHARPNESS = 12.0  # the scale of attention's logits
_MOST_FAILURES_SHOWN = 5


@dataclass(frozen=True)
class Settings:
    steps: int = 300
    top_k: int = 256
    hot_buffer: int = 1024
    seed: int = 0


@dataclass
class RequestReport:
    """Counts of one request. Reads are selected positions other than the newest, while the request is longer than H."""

    name: str
    prompt: int
    length: int = 0
    reads: int = 0
    misses: int = 0
    selected_again: int = 0
    attention_weight: float = 0.0  # share of full attention's weight on the selected positions, summed over the steps

    @property
    def hits(self) -> int:
        return self.reads - self.misses


@dataclass
class Report:
    settings: Settings
    device: str
    item_bytes: int
    words: int
    requests: list[RequestReport]
    full_cache_bytes: int
    hot_buffer_bytes: int
    outputs_compared: int = 0
    slots_compared: int = 0
    device_to_host_bytes: int = 0
    swap_in_seconds: float = 0.0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def reads(self) -> int:
        return sum(request.reads for request in self.requests)

    @property
    def misses(self) -> int:
        return sum(request.misses for request in self.requests)

    @property
    def passed(self) -> bool:
        return not self.failures

    def numbers(self) -> dict[str, Any]:
        """What `--json` writes."""
        return asdict(self) | {
            "version": hisparse.__version__,
            "requests": [asdict(request) | {"hits": request.hits} for request in self.requests],
            "reads": self.reads,
            "hits": self.reads - self.misses,
            "misses": self.misses,
            "hit_rate": _share(self.reads - self.misses, self.reads),
            "host_to_device_bytes": self.misses * self.item_bytes,
            "host_to_device_bytes_without_hot_buffer": self.reads * self.item_bytes,
            "verdict": "pass" if self.passed else "fail",
        }


def decode(settings: Settings, arrays: Arrays, text: str | None = None) -> Report:
    """Decodes a text, or the shipped play; ValueError where it has too few words for the steps."""
    started = time.perf_counter()
    words = Words.of(load_text() if text is None else text)
    needed = 2 * settings.steps + 4
    if len(words.number) < needed:
        raise ValueError(f"{settings.steps} steps need {needed} words, the text has {len(words.number)}")
    requests = _requests(words, settings)
    batch = DecodeBatch(arrays, requests, settings.top_k, settings.hot_buffer)
    report = Report(
        settings,
        arrays.device,
        requests[0].items[0].nbytes,
        len(words.number),
        [RequestReport(request.name, request.prompt) for request in requests],
        full_cache_bytes=sum(request.items.nbytes for request in requests),
        hot_buffer_bytes=len(requests) * (settings.hot_buffer + 1) * requests[0].items[0].nbytes,
    )
    checks = Checks(batch)
    previous = np.full((len(requests), settings.top_k), -1, np.int32)
    for step in progress(range(settings.steps), "decode"):
        batch.append()
        top_k, weights = _select(batch)
        resident = [batch.slot_tokens(row) for row in range(len(requests))]
        called = time.perf_counter()
        locs, misses = batch.swap_in(top_k)
        report.swap_in_seconds += time.perf_counter() - called
        report.failures += [f"step {step}, {failure}" for failure in checks.step(top_k, locs, misses, resident)]
        for row, request in enumerate(report.requests):
            request.length = int(batch.lengths[row])
            request.attention_weight += weights[row]
            if batch.is_long(row):
                reads = _reads(batch, row, top_k[row])
                request.reads += len(reads)
                request.misses += int(misses[row])
                request.selected_again += int(np.isin(reads, previous[row]).sum())
        previous = top_k[:-1]

    report.device_to_host_bytes = batch.cache.statistics().device_to_host_bytes
    report.failures += checks.host_cache()
    report.outputs_compared, report.slots_compared = checks.outputs_compared, checks.slots_compared
    report.seconds = time.perf_counter() - started
    return report


def _requests(words: Words, settings: Settings) -> list[Request]:
    """A long and a medium request, one that outgrows its hot buffer half way, and one shorter than a top-k at first."""
    projection, total, steps = Projection(words, settings.seed), len(words.number), settings.steps
    longest = total - steps
    shapes = {
        "whole play": (0, longest),
        "one act": (total // 3, min(total // 4, longest - total // 3)),
        "outgrows buffer": (total // 5, min(max(settings.hot_buffer - steps // 2, 1), longest - total // 5)),
        "short": (total // 2, min(max(settings.top_k // 2, 1), longest - total // 2)),
    }
    return [
        Request(name, projection.items(start, start + prompt + steps), prompt)
        for name, (start, prompt) in shapes.items()
    ]


def _select(batch: DecodeBatch) -> tuple[np.ndarray, list[float]]:
    """int32 [rows + 1, K]: positions with the highest q.k, -1 past a short request's end; and their softmax weight.

    The query is the key of the newest token: look for places like this one. The last row is padding, whatever it holds.
    """
    top_k = np.full((len(batch.requests) + 1, batch.top_k), -1, np.int32)
    shares = []
    for row, request in enumerate(batch.requests):
        length = batch.lengths[row]
        count = min(batch.top_k, length)
        keys = request.items[:length, :KEY_WIDTH]
        scores = keys @ keys[-1]
        positions = np.argpartition(-scores, count - 1)[:count]
        weights = np.exp(_SHARPNESS * (scores - scores.max()))
        top_k[row, :count] = positions
        shares.append(float(weights[positions].sum() / weights.sum()))
    top_k[-1] = top_k[0]
    return top_k, shares


def _reads(batch: DecodeBatch, row: int, top_k: np.ndarray) -> np.ndarray:
    return top_k[(top_k >= 0) & (top_k != batch.lengths[row] - 1)]


def _attention(arrays: Arrays, items: Array, query: Array) -> Array:
    keys, values = items[:, :KEY_WIDTH], items[:, KEY_WIDTH:]
    scores = _SHARPNESS * (keys @ query)
    weights = arrays.exp(scores - scores.max())
    return (weights @ values) / weights.sum()


class Checks:
    """What has to hold after each step. Every check returns the failures it found, one sentence each."""

    def __init__(self, batch: DecodeBatch) -> None:
        self._batch = batch
        # Both attentions read their items from here, so that not even their alignment differs.
        self._gathered = batch.arrays.on_device(np.empty((batch.top_k, ITEM_WIDTH), np.float32))
        self.outputs_compared = 0
        self.slots_compared = 0

    def step(self, top_k: np.ndarray, locs: np.ndarray, misses: np.ndarray, resident: list[np.ndarray]) -> list[str]:
        failures = [] if (locs[-1] == -1).all() else ["the padded row has device locs"]
        for row in range(len(self._batch.requests)):
            failures += self._miss_count(row, top_k[row], int(misses[row]), resident[row])
            failures += self._slots(row)
            failures += self._attention(row, top_k[row], locs[row])
        return failures

    def host_cache(self) -> list[str]:
        """At the end, all tokens of all requests have to be there, the decoded ones too."""
        batch = self._batch
        return [
            f"{request.name}: the host cache lost a token"
            for row, request in enumerate(batch.requests)
            if batch.items(row) != request.items[: batch.lengths[row]].tobytes()
        ]

    def _miss_count(self, row: int, top_k: np.ndarray, misses: int, resident: np.ndarray) -> list[str]:
        batch = self._batch
        absent = np.setdiff1d(_reads(batch, row, top_k), resident) if batch.is_long(row) else []
        if misses == len(absent):
            return []
        return [f"{batch.requests[row].name}: {misses} misses, but {len(absent)} selected tokens were not resident"]

    def _slots(self, row: int) -> list[str]:
        batch = self._batch
        name, tokens = batch.requests[row].name, batch.slot_tokens(row)
        slots = np.flatnonzero(tokens >= 0)
        tokens = tokens[slots]
        if (tokens >= batch.lengths[row]).any():
            return [f"{name}: a slot claims a token that the request does not have yet"]
        if batch.is_long(row):
            slots, tokens = np.append(slots, batch.hot_buffer), np.append(tokens, batch.lengths[row] - 1)
        self.slots_compared += len(slots)
        held = batch.device_buffer[batch.slot_locs(row)[slots]]
        if batch.arrays.same_bytes(held, batch.full_caches[row][tokens]):
            return []
        return [f"{name}: a device slot does not hold the bytes of its token"]

    def _attention(self, row: int, top_k: np.ndarray, locs: np.ndarray) -> list[str]:
        batch = self._batch
        name, used = batch.requests[row].name, top_k >= 0
        own_locs = batch.slot_locs(row)
        if (locs[~used] != -1).any() or not np.isin(locs[used], own_locs).all():
            return [f"{name}: a device loc is not one of the request's slots"]
        arrays, full_cache, out = batch.arrays, batch.full_caches[row], self._gathered[: int(used.sum())]
        query = full_cache[int(batch.lengths[row]) - 1, :KEY_WIDTH]
        swapped_in = _attention(arrays, arrays.gather(batch.device_buffer, locs[used], out), query)
        expected = _attention(arrays, arrays.gather(full_cache, top_k[used], out), query)
        self.outputs_compared += 1
        if arrays.same_bytes(swapped_in, expected):
            return []
        return [f"{name}: attention over the device slots differs from attention over the full cache"]


def _print_report(report: Report) -> None:
    numbers = report.numbers()
    print(f"{'request':<16}{'prompt':>8}{'length':>8}{'reads':>9}{'hits':>9}{'misses':>8}{'hit rate':>10}{'weight':>8}")
    for request in report.requests:
        print(
            f"{request.name:<16}{request.prompt:>8,}{request.length:>8,}{request.reads:>9,}{request.hits:>9,}"
            f"{request.misses:>8,}{_percent(request.hits, request.reads):>10}"
            f"{_percent(request.attention_weight, report.settings.steps):>8}"
        )
    print(
        "reads: selected positions, the newest aside, while a request is longer than its hot buffer\n"
        "weight: share of full attention's weight that is on the selected positions\n"
    )
    moved, all_moved = numbers["host_to_device_bytes"], numbers["host_to_device_bytes_without_hot_buffer"]
    again = sum(request.selected_again for request in report.requests)
    print(f"host to device   {_megabytes(moved)}; without hot buffers every read, {_megabytes(all_moved)}")
    print(f"device to host   {_megabytes(numbers['device_to_host_bytes'])}, each new token once")
    print(
        f"device memory    {_megabytes(report.hot_buffer_bytes)} of hot buffers "
        f"stand for {_megabytes(report.full_cache_bytes)} of KV cache"
    )
    print(
        f"locality         {_percent(again, report.reads)} of the reads were selected one step earlier too; "
        f"H = {report.settings.hot_buffer} slots hit {_percent(report.reads - report.misses, report.reads)}"
    )
    print(
        f"checked          {report.outputs_compared:,} attention outputs bit for bit, "
        f"{report.slots_compared:,} device slots byte for byte"
    )
    print(f"time             {report.seconds:.1f} s, of which the op {report.swap_in_seconds:.1f} s")
    if report.device == "cpu":
        print(
            "                 (the CPU target runs the GPU kernel thread by thread; its time tells nothing of a GPU's)"
        )
    print()
    for failure in report.failures[:_MOST_FAILURES_SHOWN]:
        print(f"  {failure}")
    if report.passed:
        print("PASS: in every step, attention over the swapped-in slots equals attention over the full cache.")
    else:
        print(f"FAIL: {len(report.failures)} checks failed.")


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = Settings()
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU, with torch (also on ROCm)"
    )
    parser.add_argument("--steps", type=_integer(1, 5000), default=defaults.steps, help="words to decode (%(default)s)")
    parser.add_argument(
        "--top-k", type=_integer(1, 32768), default=defaults.top_k, help="positions read per step, K (%(default)s)"
    )
    parser.add_argument(
        "--hot-buffer",
        type=_integer(1, 32768),
        default=defaults.hot_buffer,
        help="device slots per request, H (%(default)s)",
    )
    parser.add_argument(
        "--warp-size", type=int, choices=[32, 64], help="of the CPU target (64, or HISPARSE_CPU_WARP_SIZE)"
    )
    parser.add_argument(
        "--seed", type=_integer(0, 2**63 - 1), default=defaults.seed, help="of the projection (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if args.hot_buffer < args.top_k:
        parser.error(f"argument --hot-buffer: must be at least --top-k ({args.top_k}), got {args.hot_buffer}")
    if args.device == "cuda" and args.warp_size:
        parser.error("argument --warp-size: a GPU has the width it has, this option is for --device cpu")
    try:
        arrays = TorchArrays() if args.device == "cuda" else NumpyArrays()
    except RuntimeError as error:
        parser.error(str(error))
    settings = Settings(args.steps, args.top_k, args.hot_buffer, args.seed)
    try:
        with hisparse.cpu.options(warp_size=args.warp_size):
            on = "GPU" if args.device == "cuda" else f"CPU target, warp size {hisparse.cpu.get_options().warp_size}"
            print(f"Decoding {settings.steps} words of each of 4 requests, their KV cache in host memory. {on}.")
            print(f"top_k {settings.top_k}, hot buffer {settings.hot_buffer}, items of {4 * ITEM_WIDTH} bytes.\n")
            report = decode(settings, arrays)
    except ValueError as error:  # what the op refuses, such as a hot buffer too large for the GPU
        parser.error(str(error))
    _print_report(report)
    if args.json:
        args.json.write_text(json.dumps(report.numbers(), indent=2) + "\n")
    return 0 if report.passed else 1


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {low}..{high}, got {value}")
        return value

    parse.__name__ = "integer"  # argparse names it where the text is no number
    return parse
