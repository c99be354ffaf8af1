"""The transfers of ``hisparse.kvcacheio`` against the plain copy of as many items, at the best number of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from types import ModuleType
from typing import Any

import hisparse
from hisparse import kvcacheio

from .timing import Time, device, time_together, warm_up

ITEM_SIZES = (512, 576, 656, 1152, 4096)
ITEMS = (65536, 256)
QUOTAS = (2, 4, 8, 16)
OPS = ("per layer", "all layers", "page first")
DIRECTIONS = ("h2d", "d2h")
LAYERS = 8
CEILING_BLOCKS = (8, 16, 32, 66, 132, 264)
CEILING_ITEMS = 65536

COLUMNS = {
    "op": "op",
    "direction": "direction",
    "items": "items",
    "item_size_bytes": "item",
    "block_quota": "quota",
    "us": "us",
    "spread": "spread",
    "gb_per_s": "GB/s",
    "ceiling_gb_per_s": "ceiling",
    "share_of_ceiling": "share",
    "peer_us": "peer us",
    "peer_gb_per_s": "peer GB/s",
    "peer_ratio": "peer/ours",
}


@dataclass(frozen=True)
class Case:
    op: str  # "per layer" and "all layers" are layer first; "page first" is so on the host
    direction: str
    item_size_bytes: int
    items: int  # over all layers
    block_quota: int

    @property
    def variants(self) -> int:
        """Calls in a graph, each with tokens of its own, so that no line of the host is read twice in a row."""
        return 16 if self.items * self.item_size_bytes < 8 << 20 else 2

    @property
    def moves_all_layers(self) -> bool:
        return self.op == "all layers" or (self.op, self.direction) == ("page first", "d2h")

    @property
    def tokens(self) -> int:
        """Of a pool: enough for the tokens of all calls."""
        return max(CEILING_ITEMS, self.items * self.variants) // (LAYERS if self.moves_all_layers else 1)


@dataclass(frozen=True)
class Row:
    """One measured case. Times in microseconds, rates in GB/s (1e9 bytes)."""

    case: Case
    time: Time
    ceiling: float
    peer: Time | None

    def as_dict(self) -> dict[str, Any]:
        size = self.case.items * self.case.item_size_bytes
        rate = size / self.time.median / 1e3
        flat = asdict(self.case) | {"us": self.time.median, "spread": self.time.spread, "gb_per_s": rate}
        flat |= {"ceiling_gb_per_s": self.ceiling, "share_of_ceiling": rate / self.ceiling}
        us = self.peer.median if self.peer else None
        flat |= {"peer_us": us, "peer_spread": self.peer.spread if self.peer else None}
        return flat | {
            "peer_gb_per_s": size / us / 1e3 if us else None,
            "peer_ratio": us / self.time.median if us else None,
        }


class Pools:
    """Memory on both sides, shared by all cases."""

    def __init__(self, cases: Iterable[Case]) -> None:
        import torch

        host = max(case.tokens * (1 if case.op == "per layer" else LAYERS) * case.item_size_bytes for case in cases)
        items = max(CEILING_ITEMS, *(case.tokens * (LAYERS if case.moves_all_layers else 1) for case in cases))
        items *= max(case.item_size_bytes for case in cases)
        self.host = torch.full((host,), 7, dtype=torch.uint8, pin_memory=device() == "cuda")
        self.device = torch.zeros(items, dtype=torch.uint8, device=device())

    def ends(self, direction: str) -> tuple[Any, Any]:
        return (self.host, self.device) if direction == "h2d" else (self.device, self.host)


def layer_table(pool: Any, layer_bytes: int) -> Any:
    import torch

    base = pool.data_ptr()
    if device() == "cuda":
        base = kvcacheio.get_device_accessible_ptr(pool, torch.cuda.current_device())
    return torch.tensor([base + layer * layer_bytes for layer in range(LAYERS)], dtype=torch.uint64).to(device())


def make_call(case: Case, pools: Pools) -> Callable[[Any, int], None]:
    """``call(module, i)`` makes the i-th call of the case with the functions of a module."""
    import torch

    item, count = case.item_size_bytes, case.items // (LAYERS if case.moves_all_layers else 1)
    generator = torch.Generator().manual_seed(7)
    src_order, dst_order = (torch.randperm(case.tokens, generator=generator).to(device()) for _ in range(2))
    src, dst = pools.ends(case.direction)
    table = partial(layer_table, layer_bytes=case.tokens * item)
    if case.op == "per layer":
        name, ends, sizes = "transfer_kv_per_layer_mla", (src, dst), (item,)
    elif case.op == "all layers":
        name, ends, sizes = "transfer_kv_all_layer_mla", (table(src), table(dst)), (item, LAYERS)
    elif case.direction == "h2d":
        name, ends, sizes = "transfer_kv_per_layer_mla_pf_lf", (src, dst), (LAYERS // 2, item, LAYERS * item)
    else:
        name, ends, sizes = "transfer_kv_all_layer_mla_lf_pf", (table(src), dst), (item, LAYERS * item, LAYERS)

    def call(module: ModuleType, i: int) -> None:
        indices = (order[i * count : (i + 1) * count] for order in (src_order, dst_order))
        getattr(module, name)(*ends, *indices, *sizes, block_quota=case.block_quota)

    return call


def measure_ceiling(pools: Pools, direction: str, item_size_bytes: int) -> float:
    """GB/s of a long copy of such items in random order, with the best number of blocks."""
    import torch

    src_order, dst_order = (torch.randperm(CEILING_ITEMS).to(device()) for _ in range(2))

    def copy(_: int, blocks: int) -> None:
        hisparse.copy_items(*pools.ends(direction), src_order, dst_order, item_size_bytes, blocks=blocks)

    times = time_together({str(blocks): partial(copy, blocks=blocks) for blocks in CEILING_BLOCKS}, 2)
    return CEILING_ITEMS * item_size_bytes / min(time.median for time in times.values()) / 1e3


def measure(
    cases: list[Case],
    peer: ModuleType | None = None,
    progress: Callable[[list[Case]], Iterable[Case]] = lambda cases: cases,
) -> Iterator[Row]:
    """Measures the cases on the current device, one row each. ``peer`` is a module with the same function names."""
    pools = Pools(cases)
    warm_up()
    ceilings: dict[tuple[str, int], float] = {}
    for case in progress(cases):
        key = (case.direction, case.item_size_bytes)
        if key not in ceilings:
            ceilings[key] = measure_ceiling(pools, *key)
        call = make_call(case, pools)
        calls = {"ours": partial(call, kvcacheio)} | ({"peer": partial(call, peer)} if peer else {})
        times = time_together(calls, case.variants)
        yield Row(case, times["ours"], ceilings[key], times.get("peer"))


def all_cases(
    ops: tuple[str, ...] = OPS,
    directions: tuple[str, ...] = DIRECTIONS,
    item_sizes: tuple[int, ...] = ITEM_SIZES,
    items: tuple[int, ...] = ITEMS,
    quotas: tuple[int, ...] = QUOTAS,
) -> list[Case]:
    product = itertools.product(ops, directions, items, item_sizes, quotas)
    return [Case(op, direction, size, count, quota) for op, direction, count, size, quota in product]
