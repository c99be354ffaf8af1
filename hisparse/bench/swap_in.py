"""The swap-in against the plain copy of the same items."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import hisparse

from .timing import Time, time_in_graph

TOP_K = 2048
HOT_BUFFERS = (4096, 6144, 8192)
ITEM_SIZES = (512, 576, 656, 1024, 1152)
MISS_RATES = (0.2, 0.05, 0.001, 0.0)  # 0: all hits, the common case of decode
BATCHES = (1, 4, 10, 24, 100)
COPY_BLOCKS = (4, 16, 32, 66, 132, 264, 528)
SEQ_LEN = 32768
HOST_ITEMS = 1 << 19
PAGE_SIZE = 64
VARIANTS = 8  # different top-k sets per row, so that no host line is read twice in a row


@dataclass(frozen=True)
class Case:
    hot_buffer_size: int
    item_size_bytes: int
    miss_rate: float
    batch: int
    ordered: bool  # tables, LRU and host locs in order, as after a prompt; else shuffled, as after many steps

    @property
    def misses(self) -> int:
        return round(TOP_K * self.miss_rate)


@dataclass(frozen=True)
class Row:
    """One measured case. Times in microseconds, rates in GB/s (1e9 bytes)."""

    case: Case
    time: Time
    one_block: Time
    floor: Time
    floor_blocks: int
    ceiling: float
    peer: Time | None

    @property
    def bytes(self) -> int:
        return self.case.batch * self.case.misses * self.case.item_size_bytes

    def as_dict(self) -> dict[str, Any]:
        flat = asdict(self.case) | {"us": self.time.median, "spread": self.time.spread}
        flat |= {"one_block_us": self.one_block.median, "floor_us": self.floor.median}
        flat |= {"floor_blocks": self.floor_blocks, "over_floor_us": self.time.median - self.floor.median}
        flat |= {"gb_per_s": self.bytes / self.time.median / 1e3, "ceiling_gb_per_s": self.ceiling}
        flat |= {"share_of_ceiling": self.bytes / self.time.median / 1e3 / self.ceiling}
        flat["peer_us"] = self.peer.median if self.peer else None
        return flat


class State:
    """The tensors of one case on the current GPU, with a way to put the tables back."""

    def __init__(self, case: Case, host_pool: Any, device_pool: Any) -> None:
        import torch

        self.case = case
        generator = torch.Generator("cuda").manual_seed(7)
        batch, hot, misses = case.batch, case.hot_buffer_size, case.misses
        width = hot + PAGE_SIZE

        def shuffled(count: int) -> Any:
            if case.ordered:
                return torch.arange(count, device="cuda")
            return torch.randperm(count, generator=generator, device="cuda")

        tokens, lru, top_k = [], [], []
        for _ in range(batch):
            order = shuffled(SEQ_LEN - 1)
            resident, away = order[:hot], order[hot:]
            tokens.append(torch.nn.functional.pad(resident, (0, PAGE_SIZE), value=-1))
            lru.append(shuffled(hot))
            row = []
            for variant in range(VARIANTS):
                missed = away[variant * misses : (variant + 1) * misses]
                hit = resident[shuffled(hot)[: TOP_K - misses]]
                row.append(torch.cat([hit, missed])[shuffled(TOP_K)])
            top_k.append(torch.stack(row))
        self.fresh_tokens = torch.stack(tokens).int()
        self.fresh_lru = torch.stack(lru).short()
        self.tokens, self.lru = self.fresh_tokens.clone(), self.fresh_lru.clone()
        self.top_k = torch.stack(top_k, dim=1).int().contiguous()  # [variants, batch, TOP_K]
        self.host_locs = torch.stack([shuffled(HOST_ITEMS)[:SEQ_LEN] for _ in range(batch)])
        self.locs = shuffled(batch * width).int().view(batch, width)
        self.out = torch.empty(batch, TOP_K, dtype=torch.int32, device="cuda")
        self.requests = torch.arange(batch, device="cuda")
        self.seq_lens = torch.full((batch,), SEQ_LEN, device="cuda")
        self.host_pool = host_pool[: HOST_ITEMS * case.item_size_bytes]
        self.device_pool = device_pool[: batch * width * case.item_size_bytes]

    def reset(self) -> None:
        self.tokens.copy_(self.fresh_tokens)
        self.lru.copy_(self.fresh_lru)

    def arguments(self, variant: int) -> dict[str, Any]:
        return {
            "top_k_tokens": self.top_k[variant],
            "device_buffer_tokens": self.tokens,
            "host_cache_locs": self.host_locs,
            "device_buffer_locs": self.locs,
            "host_cache": self.host_pool,
            "device_buffer": self.device_pool,
            "top_k_device_locs": self.out,
            "req_pool_indices": self.requests,
            "seq_lens": self.seq_lens,
            "lru_slots": self.lru,
            "item_size_bytes": self.case.item_size_bytes,
            "num_top_k": TOP_K,
            "hot_buffer_size": self.case.hot_buffer_size,
            "page_size": PAGE_SIZE,
        }

    def plans(self) -> list[tuple[Any, Any]]:
        """Per variant the host locs and device locs of all misses, as the op itself plans them."""
        import torch

        batch = self.case.batch
        src = torch.zeros(batch, TOP_K, dtype=torch.int64, device="cuda")
        dst = torch.zeros(batch, TOP_K, dtype=torch.int32, device="cuda")
        count = torch.zeros(batch, dtype=torch.int32, device="cuda")
        plans = []
        for variant in range(VARIANTS):
            self.reset()
            hisparse.load_cache_to_device_buffer_mla(
                **self.arguments(variant), miss_src=src, miss_dst=dst, miss_count=count, skip_io=True
            )
            missed = torch.arange(TOP_K, device="cuda")[None] < count[:, None]
            if int(count.sum()) != batch * self.case.misses:
                raise RuntimeError(f"{self.case}: planned {count.tolist()} misses")
            plans.append((src[missed].contiguous(), dst[missed].long().contiguous()))
        return plans


def replays_for(case: Case) -> int:
    return 20 if case.batch * case.misses * case.item_size_bytes > 4 << 20 else 60


def measure_floor(state: State, replays: int) -> tuple[Time, int]:
    """The pure copy of the same items with the best number of blocks."""
    case = state.case
    if case.misses == 0:
        return Time(0.0, 0.0), 0
    plans = state.plans()

    def copy_with(blocks: int) -> Callable[[int], None]:
        def copy(i: int) -> None:
            hisparse.copy_items(state.host_pool, state.device_pool, *plans[i], case.item_size_bytes, blocks=blocks)

        return copy

    times = [(time_in_graph(copy_with(blocks), state.reset, VARIANTS, replays), blocks) for blocks in COPY_BLOCKS]
    return min(times, key=lambda timed: timed[0].median)


def measure_ceiling(host_pool: Any, device_pool: Any, item_size_bytes: int, ordered: bool) -> float:
    """GB/s of a long gather of such items from host memory, with the best number of blocks."""
    import torch

    count = 1 << 16
    order = torch.arange(count) if ordered else torch.randperm(HOST_ITEMS)[:count]
    src, dst = order.cuda(), torch.randperm(count).cuda()

    def rate(blocks: int) -> float:
        def copy(_: int) -> None:
            hisparse.copy_items(host_pool, device_pool, src, dst, item_size_bytes, blocks=blocks)

        return count * item_size_bytes / time_in_graph(copy, None, 2, 5).median / 1e3

    return max(rate(blocks) for blocks in COPY_BLOCKS[2:])


def measure(
    cases: list[Case],
    peer: ModuleType | None = None,
    progress: Callable[[list[Case]], Iterable[Case]] = lambda cases: cases,
) -> Iterator[Row]:
    """Measures the cases on the current GPU, one row each. ``peer`` is a module with the same function names."""
    import torch

    largest = max(case.item_size_bytes for case in cases)
    slots = max(case.batch * (case.hot_buffer_size + PAGE_SIZE) for case in cases)
    host_pool = torch.empty(HOST_ITEMS * largest, dtype=torch.uint8, pin_memory=True)
    host_pool.view(torch.int32).random_()
    device_pool = torch.zeros(max(slots, 1 << 16) * largest, dtype=torch.uint8, device="cuda")
    ceilings: dict[tuple[int, bool], float] = {}
    floors: dict[tuple[int, float, int, bool], tuple[Time, int]] = {}

    for case in progress(cases):
        state = State(case, host_pool, device_pool)
        replays = replays_for(case)

        def timed(op: Callable[..., None], replays: int = replays, state: State = state, **options: Any) -> Time:
            return time_in_graph(lambda i: op(**state.arguments(i), **options), state.reset, VARIANTS, replays)

        pools = (case.item_size_bytes, case.ordered)
        if pools not in ceilings:
            ceilings[pools] = measure_ceiling(host_pool, device_pool, *pools)
        items = (case.item_size_bytes, case.miss_rate, case.batch, case.ordered)
        if items not in floors:  # the hot buffer's size is nothing to a copy
            floors[items] = measure_floor(state, replays)
        floor, floor_blocks = floors[items]
        yield Row(
            case=case,
            time=timed(hisparse.load_cache_to_device_buffer_mla),
            one_block=timed(hisparse.load_cache_to_device_buffer_mla, blocks_per_request=1),
            floor=floor,
            floor_blocks=floor_blocks,
            ceiling=ceilings[pools],
            peer=timed(peer.load_cache_to_device_buffer_mla, block_size=1024) if peer else None,
        )


def all_cases(
    hot_buffers: tuple[int, ...] = HOT_BUFFERS,
    item_sizes: tuple[int, ...] = ITEM_SIZES,
    miss_rates: tuple[float, ...] = MISS_RATES,
    batches: tuple[int, ...] = BATCHES,
    ordered: tuple[bool, ...] = (False, True),
) -> list[Case]:
    product = itertools.product(ordered, hot_buffers, item_sizes, miss_rates, batches)
    return [Case(hot, item, miss, batch, state) for state, hot, item, miss, batch in product]
