"""Swap-ins beside the plain copy of the same items, one block per request, and a peer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from types import ModuleType
from typing import Any

import hisparse

from .state import HOST_ITEMS, PAGE_SIZE, TOP_K, VARIANTS, State
from .timing import Time, device, time_together, warm_up

HOT_BUFFERS = (4096, 6144, 8192)
ITEM_SIZES = (512, 576, 656, 1024, 1152)
MISS_RATES = (0.2, 0.05, 0.001, 0.0)  # 0: all hits, the common case of decode
BATCHES = (1, 4, 10, 24, 100)
STATES = ("shuffled", "ordered")
HOST_ORDERS = ("random", "sequential")
PEER_BLOCK_SIZE = 1024

COPY_BLOCKS = (4, 16, 32, 66, 132, 264, 528)
CEILING_ITEMS = 1 << 16


@dataclass(frozen=True)
class Case:
    state: str  # "shuffled": tables, LRU order and top-k sets as after many steps; "ordered": as after a prompt
    host_order: str  # "random" or "sequential" in the tokens of a request
    hot_buffer_size: int
    batch: int
    miss_rate: float
    item_size_bytes: int

    @property
    def misses(self) -> int:
        return round(TOP_K * self.miss_rate)

    @property
    def bytes(self) -> int:
        return self.batch * self.misses * self.item_size_bytes

    def make_state(self) -> State:
        ordered, sequential = self.state == "ordered", self.host_order == "sequential"
        return State(self.hot_buffer_size, self.misses, self.batch, ordered, sequential)


def all_cases(
    hot_buffers: Iterable[int] = HOT_BUFFERS,
    item_sizes: Iterable[int] = ITEM_SIZES,
    miss_rates: Iterable[float] = MISS_RATES,
    batches: Iterable[int] = BATCHES,
    states: Iterable[str] = STATES,
    host_orders: Iterable[str] = HOST_ORDERS,
) -> list[Case]:
    """All combinations; those of one state follow each other."""
    return list(
        itertools.starmap(Case, itertools.product(states, host_orders, hot_buffers, batches, miss_rates, item_sizes))
    )


@dataclass(frozen=True)
class Row:
    """One measured case. Times in microseconds, rates in GB/s (1e9 bytes)."""

    case: Case
    times: dict[str, Time]  # "ours", "one block", "floor" where something is copied, "peer" where there is one
    floor_blocks: int
    ceiling: float

    def as_dict(self) -> dict[str, Any]:
        us = {name: time.median for name, time in self.times.items()}
        ours, floor, peer = us["ours"], us.get("floor", 0.0), us.get("peer")
        rate = self.case.bytes / ours / 1e3
        return asdict(self.case) | {
            "us": ours,
            "spread": self.times["ours"].spread,
            "floor_us": floor,
            "floor_blocks": self.floor_blocks,
            "over_floor_us": ours - floor,
            "share_of_floor": floor / ours,
            "gb_per_s": rate,
            "ceiling_gb_per_s": self.ceiling,
            "share_of_ceiling": rate / self.ceiling,
            "one_block_us": us["one block"],
            "one_block_spread": self.times["one block"].spread,
            "peer_us": peer,
            "peer_spread": self.times["peer"].spread if peer else None,
            "peer_ratio": peer / ours if peer else None,
        }


class Pools:
    """Items on both sides, shared by all cases."""

    def __init__(self, device_items: int, largest_item: int) -> None:
        import torch

        on_gpu = device() == "cuda"
        self.host = torch.empty(HOST_ITEMS * largest_item, dtype=torch.uint8, pin_memory=on_gpu)
        self.host.view(torch.int32).random_()
        self.device = torch.zeros(max(device_items, CEILING_ITEMS) * largest_item, dtype=torch.uint8, device=device())

    def of(self, item_size_bytes: int, device_items: int = CEILING_ITEMS) -> tuple[Any, Any]:
        return self.host[: HOST_ITEMS * item_size_bytes], self.device[: device_items * item_size_bytes]


def measure_ceiling(pools: Pools, item_size_bytes: int, sequential: bool, blocks: Iterable[int]) -> float:
    """GB/s of a long gather of such items from the host, with the best number of blocks."""
    import torch

    order = torch.arange(HOST_ITEMS) if sequential else torch.randperm(HOST_ITEMS)
    src, dst = order[:CEILING_ITEMS].to(device()), torch.randperm(CEILING_ITEMS).to(device())
    ends = pools.of(item_size_bytes)

    def copy(_: int, count: int) -> None:
        hisparse.copy_items(*ends, src, dst, item_size_bytes, blocks=count)

    times = time_together({str(count): partial(copy, count=count) for count in blocks}, 2)
    return CEILING_ITEMS * item_size_bytes / min(time.median for time in times.values()) / 1e3


class Bench:
    """Measures cases on the current device, and keeps what they have in common."""

    def __init__(self, cases: list[Case], peer: ModuleType | None) -> None:
        self.peer = peer
        slots = max(case.batch * (case.hot_buffer_size + PAGE_SIZE) for case in cases)
        self.pools = Pools(slots, max(case.item_size_bytes for case in cases))
        self.copy_blocks = COPY_BLOCKS if device() == "cuda" else COPY_BLOCKS[:1]
        self.ceilings: dict[tuple[int, str], float] = {}
        self.floor_blocks: dict[tuple[Any, ...], int] = {}
        self.state: State | None = None
        self.state_key: Case | None = None

    def state_of(self, case: Case) -> State:
        key = Case(**asdict(case) | {"item_size_bytes": 0})
        if self.state is None or key != self.state_key:
            self.state = None  # before the next: two of 100 requests are large
            self.state, self.state_key = case.make_state(), key
        return self.state

    def measure(self, case: Case) -> Row:
        state, item = self.state_of(case), case.item_size_bytes
        pools = self.pools.of(item, state.device_items)
        key = (item, case.host_order)
        if key not in self.ceilings:
            self.ceilings[key] = measure_ceiling(
                self.pools, item, case.host_order == "sequential", self.copy_blocks[-5:]
            )

        def swap_in(i: int, module: ModuleType = hisparse, **options: Any) -> None:
            module.load_cache_to_device_buffer_mla(**state.arguments(i, *pools, item), **options)

        calls = {"ours": swap_in, "one block": partial(swap_in, blocks_per_request=1)}
        if self.peer is not None:
            calls["peer"] = partial(swap_in, module=self.peer, block_size=PEER_BLOCK_SIZE)
        blocks = 0
        if case.misses > 0:
            plans = state.plans(*pools, item)

            def copy(i: int, count: int) -> None:
                hisparse.copy_items(*pools, *plans[i], item, blocks=count)

            blocks = self.best_copy_blocks(case, state, copy)
            calls["floor"] = partial(copy, count=blocks)
        return Row(case, time_together(calls, VARIANTS, state.reset), blocks, self.ceilings[key])

    def best_copy_blocks(self, case: Case, state: State, copy: Callable[[int, int], None]) -> int:
        """How many blocks copy such items fastest; the size of the hot buffer is nothing to a copy."""
        key = (case.state, case.host_order, case.batch, case.misses, case.item_size_bytes)
        if key not in self.floor_blocks:
            calls = {str(count): partial(copy, count=count) for count in self.copy_blocks}
            times = time_together(calls, VARIANTS, state.reset, seconds=0.005)
            self.floor_blocks[key] = int(min(times, key=lambda count: times[count].median))
        return self.floor_blocks[key]


def measure(
    cases: list[Case],
    peer: ModuleType | None = None,
    progress: Callable[[list[Case]], Iterable[Case]] = lambda cases: cases,
) -> Iterator[Row]:
    """Measures the cases on the current device, one row each. ``peer`` is a module with the same function names."""
    bench = Bench(cases, peer)
    warm_up()
    yield from map(bench.measure, progress(cases))
