"""Runs ops of hisparse and of a peer on the same inputs over random steps, and compares everything they write.

    python benchmarks/compare_sglang.py                      sglang and sglang-kernel, where they are installed
    python benchmarks/compare_sglang.py --peer my_module     any module with functions of sglang's names

Outputs, tables, LRU rows, plans and every byte of the pools have to be equal after every step. The state is what a long
decode leaves: residents, LRU and locs in random order, no two rows alike. Inputs are those that sglang defines: a
selection has each position once, and unused entries in short rows alone, behind the others.

Ends with 1 where something differs, or where nothing could be compared.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import hisparse
from hisparse import kvcacheio

SGLANG = (
    "sglang.kernels.ops.kvcache.hisparse",
    "sglang.kernels.ops.kvcache.hisparse_slot_mapping",
    "sgl_kernel.kvcacheio",
)
DSV4_ITEM, DSV4_PAGE_TOKENS, DSV4_PAGE_BYTES = 584, 64, 37440
Arrays = dict[str, Any]


@dataclass
class Sizes:
    device: str
    top_k: int
    hot: int
    item: int
    requests: int
    page: int = 64
    block_tokens: int = 64  # of a selected block
    length: int = 0  # tokens of the longest request
    options: dict[str, int] = field(default_factory=dict)

    def host_pool(self, rng: np.random.Generator, *shape: int) -> torch.Tensor:
        pool = torch.from_numpy(rng.integers(0, 256, shape, np.uint8))
        return pool if self.device == "cpu" else pool.pin_memory()

    def on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def permutation(self, rng: np.random.Generator, count: int, dtype: type) -> torch.Tensor:
        return self.on_device(rng.permutation(count).astype(dtype))


class Decode:
    """Hot buffers of one layer, or of two that share a plan: what the calls of a decode take."""

    def __init__(self, rng: np.random.Generator, sizes: Sizes, name: str):
        self.rng, self.sizes, self.name = rng, sizes, name
        self.dsv4, self.blocks, self.planned = "dsv4" in name, "blocks" in name, "planned" in name
        self.item = DSV4_ITEM if self.dsv4 else sizes.item
        requests, slots, length = sizes.requests, sizes.hot + sizes.page, sizes.length
        residents = np.stack([rng.permutation(length - 64)[:slots] for _ in range(requests)]).astype(np.int32)
        residents[:, sizes.hot :] = -1
        lru = np.stack([rng.permutation(sizes.hot) for _ in range(requests)]).astype(np.int16)
        self.read = {
            "host_cache_locs": sizes.permutation(rng, requests * length, np.int64).view(requests, length),
            "device_buffer_locs": sizes.permutation(rng, requests * slots, np.int32).view(requests, slots),
        }
        self.hosts = [self.pool(requests * length, host=True) for _ in range(2)]
        ours = {"device_buffer_tokens": sizes.on_device(residents), "lru_slots": sizes.on_device(lru)}
        ours |= {f"device_buffer[{n}]": self.pool(requests * slots, host=False) for n in range(2)}
        plan_shape = (requests, sizes.top_k)
        ours["miss_src"] = torch.full(plan_shape, -9, dtype=torch.int64, device=sizes.device)
        ours["miss_dst"] = torch.full(plan_shape, -9, dtype=torch.int32, device=sizes.device)
        ours["miss_count"] = torch.full((requests,), -9, dtype=torch.int32, device=sizes.device)
        ours["top_k_device_locs"] = torch.full(plan_shape, 123456, dtype=torch.int32, device=sizes.device)
        self.sides = [ours, {key: value.clone() for key, value in ours.items()}]

    def pool(self, items: int, host: bool) -> torch.Tensor:
        rows, row = (-(-items // DSV4_PAGE_TOKENS), DSV4_PAGE_BYTES) if self.dsv4 else (items, self.item)
        pool = self.sizes.host_pool(self.rng, rows, row)
        return pool if host else pool.to(self.sizes.device)

    def step(self, number: int) -> Callable[[Callable[..., Any], Arrays], None]:
        """What this step calls a side's function with."""
        rng, sizes = self.rng, self.sizes
        batch = int(rng.integers(1, sizes.requests + 1))
        rids = rng.permutation(sizes.requests)[:batch]
        lengths = np.where(rng.random(batch) < 0.2, rng.integers(1, sizes.hot + 1, batch), sizes.length - 64 + number)
        tokens = self.sides[0]["device_buffer_tokens"].cpu().numpy()
        rows = [
            self.selection(int(length), tokens[rid, : sizes.hot]) for length, rid in zip(lengths, rids, strict=True)
        ]
        real = batch if rng.random() < 0.7 else int(rng.integers(0, batch + 1))
        given = {
            "top_k_tokens": sizes.on_device(np.stack(rows).astype(np.int32)),
            "req_pool_indices": sizes.on_device(rids.astype(np.int64)),
            "seq_lens": sizes.on_device(lengths.astype(np.int64)),
            "num_real_reqs": torch.tensor([real], dtype=torch.int32, device=sizes.device),
            "hot_buffer_size": sizes.hot,
            "page_size": sizes.page,
            "item_size_bytes": self.item,
            **self.read,
            **sizes.options,
        }

        def call(functions: Any, side: Arrays) -> None:
            written = {key: side[key] for key in ("device_buffer_tokens", "lru_slots")}
            written["top_k_device_locs"] = side["top_k_device_locs"][:batch]
            plan = {key: side[key][:batch] for key in ("miss_src", "miss_dst", "miss_count")}
            pools = {"host_cache": self.hosts[0], "device_buffer": side["device_buffer[0]"]}
            if self.blocks:
                both = {f"{key}_{half}": pool for key, pool in pools.items() for half in "kv"}
                both |= {"host_cache_v": self.hosts[1], "device_buffer_v": side["device_buffer[1]"]}
                arguments = {("top_k_blocks" if key == "top_k_tokens" else key): value for key, value in given.items()}
                functions(**arguments, **written, **both, sparse_block_size=sizes.block_tokens)
                return
            swap_in, copy = functions if self.planned else (functions, None)
            swap_in(**given, **written, **pools, num_top_k=sizes.top_k, **(plan if number % 2 or copy else {}))
            if copy:
                pools = {"host_cache": self.hosts[1], "device_buffer": side["device_buffer[1]"]}
                copy(**plan, **pools, num_real_reqs=given["num_real_reqs"], item_size_bytes=self.item)

        return call

    def selection(self, length: int, residents: np.ndarray) -> np.ndarray:
        rng, sizes = self.rng, self.sizes
        if self.blocks:
            chosen = rng.permutation(-(-length // sizes.block_tokens))[: sizes.top_k // sizes.block_tokens]
            row = np.full(sizes.top_k // sizes.block_tokens, -1)
        else:
            row = np.full(sizes.top_k, -1)
            chosen = rng.permutation(length)[: sizes.top_k]
            if length > sizes.hot:
                held = residents[(residents >= 0) & (residents < length - 1)]
                hits = rng.permutation(held)[: int(rng.integers(sizes.top_k // 2, sizes.top_k + 1))]
                others = np.setdiff1d(np.arange(length), np.append(held, length - 1))
                newest = [length - 1] * int(rng.random() < 0.5)
                chosen = rng.permutation([*hits, *newest, *rng.permutation(others)][: sizes.top_k])
        row[: len(chosen)] = chosen
        return row

    def written(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        ours, theirs = self.sides
        used = torch.arange(self.sizes.top_k, device=self.sizes.device) < ours["miss_count"][:, None]
        for key in ours:
            pair = [side[key] for side in (ours, theirs)]
            yield key, *([side * used for side in pair] if key in ("miss_src", "miss_dst") else pair)


class Transfer:
    """Pools of several layers in the layout of an op's ends: lf, a table of such pools, or page first."""

    LAYOUTS = {
        "transfer_kv_per_layer": ("lf", "lf"),
        "transfer_kv_per_layer_pf_lf": ("pf", "lf"),
        "transfer_kv_all_layer": ("table", "table"),
        "transfer_kv_all_layer_lf_pf": ("table", "pf"),
        "transfer_kv_per_layer_mla": ("lf", "lf"),
        "transfer_kv_per_layer_mla_pf_lf": ("pf", "lf"),
        "transfer_kv_all_layer_mla": ("table", "table"),
        "transfer_kv_all_layer_mla_lf_pf": ("table", "pf"),
        "transfer_cache_dsv4_mla": ("table", "table"),
    }
    layers, tokens = 3, 4096

    def __init__(self, rng: np.random.Generator, sizes: Sizes, name: str):
        self.rng, self.sizes, self.name, self.to_host = rng, sizes, name, "_all_layer" in name
        self.dsv4 = "dsv4" in name
        ends = ("",) if "mla" in name else ("_k", "_v")
        self.sources = {end: self.pools(self.LAYOUTS[name][0], host=not self.to_host) for end in ends}
        targets = {end: self.pools(self.LAYOUTS[name][1], host=self.to_host) for end in ends}
        self.sides = [targets, {end: [self.like(pool) for pool in pools] for end, pools in targets.items()}]

    def pools(self, layout: str, host: bool) -> list[torch.Tensor]:
        shape = (self.tokens, self.sizes.item * (self.layers if layout == "pf" else 1))
        if self.dsv4:
            shape = (self.tokens // DSV4_PAGE_TOKENS, DSV4_PAGE_BYTES)
        pools = [self.sizes.host_pool(self.rng, *shape) for _ in range(self.layers if layout == "table" else 1)]
        return pools if host else [pool.to(self.sizes.device) for pool in pools]

    def like(self, pool: torch.Tensor) -> torch.Tensor:
        return pool.clone().pin_memory() if self.sizes.device != "cpu" and not pool.is_cuda else pool.clone()

    def step(self, number: int) -> Callable[[Callable[..., Any], Arrays], None]:
        count = int(self.rng.integers(1, self.tokens))
        indices = [self.sizes.permutation(self.rng, self.tokens, np.int64)[:count] for _ in range(2)]
        options: dict[str, int] = {} if self.dsv4 else {"item_size": self.sizes.item}
        source, target = self.LAYOUTS[self.name]
        if source == "pf":
            options |= {"layer_id": number % self.layers, "src_layout_dim": self.sizes.item * self.layers}
        if target == "pf":
            options["dst_layout_dim"] = self.sizes.item * self.layers
        if source == "table" and not self.dsv4:
            options["num_layers"] = self.layers

        def argument(side: str, end: str, layout: str, pools: list[torch.Tensor]) -> tuple[str, torch.Tensor]:
            if layout != "table":
                return f"{side}{end}", pools[0]
            index = 0 if self.sizes.device == "cpu" else torch.cuda.current_device()
            addresses = [kvcacheio.get_device_accessible_ptr(pool, index) for pool in pools]
            table = torch.tensor(addresses, dtype=torch.uint64).to(self.sizes.device)
            return f"{side}_ptrs" if self.dsv4 else f"{side}{end}_layers", table

        def call(function: Callable[..., Any], targets: Arrays) -> None:
            arrays = [argument("src", end, source, pools) for end, pools in self.sources.items()]
            arrays += [argument("dst", end, target, pools) for end, pools in targets.items()]
            function(**dict(arrays), src_indices=indices[0], dst_indices=indices[1], **options)

        return call

    def written(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for end in self.sides[0]:
            for layer, pair in enumerate(zip(self.sides[0][end], self.sides[1][end], strict=True)):
                yield f"dst{end}[{layer}]", *pair


class Translate:
    """Padded locations through a mapping; a new tensor is the result."""

    def __init__(self, rng: np.random.Generator, sizes: Sizes, name: str):
        self.rng, self.sizes, self.sides = rng, sizes, [{}, {}]

    def step(self, number: int) -> Callable[[Callable[..., Any], Arrays], None]:
        kinds = [(np.int32, np.int64)[number >> n & 1] for n in range(2)]
        mapping = self.sizes.permutation(self.rng, 5000, kinds[0])
        locations = self.sizes.on_device(
            self.rng.integers(-3, 5000, 2 * int(self.rng.integers(1, 700))).astype(kinds[1])
        )

        def call(function: Callable[..., Any], side: Arrays) -> None:
            side["output"] = function(mapping, locations[:: 1 + number % 2])

        return call

    def written(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        yield "output", self.sides[0]["output"], self.sides[1]["output"]


SWAP_IN, SWAP_IN_DSV4 = "load_cache_to_device_buffer_mla", "load_cache_to_device_buffer_dsv4_mla"
# A comparison: the functions that it needs, and the case that makes its calls.
COMPARISONS: dict[str, tuple[tuple[str, ...], type]] = {
    SWAP_IN: ((SWAP_IN,), Decode),
    SWAP_IN_DSV4: ((SWAP_IN_DSV4,), Decode),
    "load_blocks_to_device_buffer_mha": (("load_blocks_to_device_buffer_mha",), Decode),
    "copy_cache_planned_mla": ((SWAP_IN, "copy_cache_planned_mla"), Decode),
    "translate_padded_hisparse_locations": (("translate_padded_hisparse_locations",), Translate),
    **{name: ((name,), Transfer) for name in Transfer.LAYOUTS},
}


def difference(key: str, ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"{key}: {ours.dtype} {tuple(ours.shape)}, the peer's {theirs.dtype} {tuple(theirs.shape)}"
    if torch.equal(ours, theirs):
        return None
    places = (ours != theirs).nonzero()
    first = tuple(places[0].tolist())
    return (
        f"{key}: {len(places)} elements differ, the first at {list(first)}: {ours[first]}, the peer's {theirs[first]}"
    )


def compare(name: str, ours: Any, theirs: Any, sizes: Sizes, steps: int, seed: int) -> str | None:
    """What differs first; None where all is equal. Raises what the peer raises."""
    rng = np.random.default_rng(seed)
    case = COMPARISONS[name][1](rng, sizes, name)
    for number in range(steps):
        call = case.step(number)
        for functions, side in zip((ours, theirs), case.sides, strict=True):
            call(functions, side)
        if sizes.device != "cpu":
            torch.cuda.synchronize()
        for key, *pair in case.written():
            if found := difference(key, *pair):
                return f"step {number}: {found}"
    return None


def functions_of(module: Any, names: tuple[str, ...]) -> Any:
    found = tuple(getattr(module, name, None) for name in names)
    return None if None in found else found[0] if len(found) == 1 else found


def run_peer(peer: Any, sizes: Sizes, item_sizes: list[int], steps: int, seed: int) -> tuple[int, int]:
    """Compares all that both have and prints a line each; (compared, different)."""
    compared = different = 0
    for name, (names, case) in COMPARISONS.items():
        theirs = functions_of(peer, names)
        ours = functions_of(hisparse, names) or functions_of(kvcacheio, names)
        if theirs is None or ours is None:
            if theirs is not None:
                print(f"{name}: not compared, hisparse {hisparse.__version__} lacks it")
            continue
        for item in item_sizes if case is not Translate and "dsv4" not in name else [DSV4_ITEM]:
            sizes.item = item
            try:
                found = compare(name, ours, theirs, sizes, steps, seed)
            except Exception as error:  # what a peer cannot do is its affair, and to be seen
                print(f"{name}, {item} B: not compared, {type(error).__name__}: {str(error).splitlines()[0][:200]}")
                continue
            compared, different = compared + 1, different + (found is not None)
            print(
                f"{name}, {item} B: {'equal over ' + str(steps) + ' steps' if found is None else 'DIFFERS, ' + found}"
            )
    return compared, different


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", help="a module with functions of sglang's names; may be repeated")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--top-k", type=int, default=2048)
    parser.add_argument("--hot-buffer", type=int, default=4096)
    parser.add_argument("--block-tokens", type=int, default=64, help="tokens of a selected block")
    parser.add_argument("--block-size", type=int, default=1024, help="threads per block of the swap-in ops")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--item-sizes", default="512,656,1152", help="bytes, of the ops that take any")
    args = parser.parse_args(argv)
    total = [0, 0]
    for name in args.peer or SGLANG:
        try:
            peer = importlib.import_module(name)
        except Exception as error:  # a package that does not load is a finding
            print(f"{name}: not compared, {type(error).__name__}: {error}")
            continue
        print(f"{name}, {getattr(peer, '__file__', None)}")
        sizes = Sizes(
            args.device,
            args.top_k,
            args.hot_buffer,
            0,
            args.requests,
            block_tokens=args.block_tokens,
            length=4 * args.hot_buffer,
            options={"block_size": args.block_size},
        )
        counts = run_peer(peer, sizes, [int(size) for size in args.item_sizes.split(",")], args.steps, args.seed)
        total = [a + b for a, b in zip(total, counts, strict=True)]
    print(f"{total[0]} comparisons, {total[1]} differ")
    return 0 if total[0] and not total[1] else 1


if __name__ == "__main__":
    sys.exit(main())
