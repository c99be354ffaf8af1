"""The transfers of ``hisparse.kvcacheio`` against the plain copy of as many items, at the best number of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import hisparse
from hisparse import kvcacheio

from .timing import Time, time_in_graph

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
        flat["peer_us"] = self.peer.median if self.peer else None
        flat["peer_gb_per_s"] = size / self.peer.median / 1e3 if self.peer else None
        return flat


class Pools:
    """Memory on both sides, shared by all cases."""

    def __init__(self, cases: Iterable[Case]) -> None:
        import torch

        host = max(case.tokens * (1 if case.op == "per layer" else LAYERS) * case.item_size_bytes for case in cases)
        device = max(CEILING_ITEMS, *(case.tokens * (LAYERS if case.moves_all_layers else 1) for case in cases))
        device *= max(case.item_size_bytes for case in cases)
        self.host = torch.full((host,), 7, dtype=torch.uint8, pin_memory=True)
        self.device = torch.zeros(device, dtype=torch.uint8, device="cuda")

    def ends(self, direction: str) -> tuple[Any, Any]:
        return (self.host, self.device) if direction == "h2d" else (self.device, self.host)


def layer_table(pool: Any, layer_bytes: int) -> Any:
    import torch

    base = kvcacheio.get_device_accessible_ptr(pool, torch.cuda.current_device())
    return torch.tensor([base + layer * layer_bytes for layer in range(LAYERS)], dtype=torch.uint64).cuda()


def make_call(case: Case, pools: Pools) -> Callable[[Any, int], None]:
    """``call(module, i)`` makes the i-th call of the case with the functions of a module."""
    import torch

    item, count = case.item_size_bytes, case.items // (LAYERS if case.moves_all_layers else 1)
    generator = torch.Generator().manual_seed(7)
    src_order, dst_order = (torch.randperm(case.tokens, generator=generator).cuda() for _ in range(2))
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

    src_order, dst_order = (torch.randperm(CEILING_ITEMS).cuda() for _ in range(2))

    def rate(blocks: int) -> float:
        def copy(_: int) -> None:
            hisparse.copy_items(*pools.ends(direction), src_order, dst_order, item_size_bytes, blocks=blocks)

        return CEILING_ITEMS * item_size_bytes / time_in_graph(copy, None, 2, 5).median / 1e3

    return max(rate(blocks) for blocks in CEILING_BLOCKS)


def measure(
    cases: list[Case],
    peer: ModuleType | None = None,
    progress: Callable[[list[Case]], Iterable[Case]] = lambda cases: cases,
) -> Iterator[Row]:
    """Measures the cases on the current GPU, one row each. ``peer`` is a module with the same function names."""
    pools = Pools(cases)
    ceilings: dict[tuple[str, int], float] = {}
    for case in progress(cases):
        key = (case.direction, case.item_size_bytes)
        if key not in ceilings:
            ceilings[key] = measure_ceiling(pools, *key)
        call = make_call(case, pools)
        replays = 30 if case.variants > 2 else 7

        def timed(module: ModuleType, call: Any = call, case: Case = case, replays: int = replays) -> Time:
            return time_in_graph(partial(call, module), None, case.variants, replays)

        yield Row(case, timed(kvcacheio), ceilings[key], timed(peer) if peer else None)


def all_cases(
    ops: tuple[str, ...] = OPS,
    directions: tuple[str, ...] = DIRECTIONS,
    item_sizes: tuple[int, ...] = ITEM_SIZES,
    items: tuple[int, ...] = ITEMS,
    quotas: tuple[int, ...] = QUOTAS,
) -> list[Case]:
    product = itertools.product(ops, directions, items, item_sizes, quotas)
    return [Case(op, direction, size, count, quota) for op, direction, count, size, quota in product]


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """GB/s of the per-layer transfers of many items against block_quota, one side per direction."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    many = max(row["items"] for row in rows)
    op = rows[0]["op"]
    directions = sorted({row["direction"] for row in rows}, reverse=True)
    figure, sides = pyplot.subplots(1, len(directions), figsize=(6.5 * len(directions), 5), squeeze=False)
    for side, direction in zip(sides[0], directions, strict=True):
        chosen = [row for row in rows if (row["op"], row["items"], row["direction"]) == (op, many, direction)]
        for size in sorted({row["item_size_bytes"] for row in chosen}):
            line = [row for row in chosen if row["item_size_bytes"] == size]
            quotas = [row["block_quota"] for row in line]
            (drawn,) = side.plot(quotas, [row["gb_per_s"] for row in line], "o-", label=f"{size} B")
            side.plot(quotas, [row["ceiling_gb_per_s"] for row in line], ":", color=drawn.get_color())
            if all(row["peer_gb_per_s"] is not None for row in line):
                side.plot(quotas, [row["peer_gb_per_s"] for row in line], "--", color=drawn.get_color(), alpha=0.5)
        side.set(
            xscale="log", xlabel="block_quota", ylabel="GB/s", ylim=(0, None), title=f"{op}, {many} items, {direction}"
        )
        side.legend(title="dotted: plain copy, dashed: peer")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
