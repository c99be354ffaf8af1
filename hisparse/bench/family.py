"""Times the swap-in's relatives on the current GPU.

DeepSeek-V4 pages and blocks of keys and values stand beside the plain swap-in of as many bytes, the planned copy beside
the plain copy of the same items, and a matrix product beside itself with a planned copy on a side stream. Each time is
that of a call in a graph, with the reset of the tables taken off; those of one row take turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import hisparse

from .timing import time_together, warm_up

TOP_K = 2048
HOT_BUFFERS = (4096, 8192)
BLOCK_TOKENS = 64
SEQ_LEN = 32768
PAGE_SIZE = 64
HOST_ITEMS = 1 << 19
REPEATS = 4
VARIANTS = 2  # different entries per row, so that no host line is read twice in a row
DSV4_ITEM, DSV4_PAGE, DSV4_PAGE_TOKENS = 584, 37_440, 64
COPY_BLOCKS = (4, 16, 32, 66, 132, 264, 528)
PLANNED_BLOCKS = 16
PLANNED_CASES = ((100, 2), (1, 410), (2, 410), (4, 410), (10, 410), (24, 410))  # rows and misses of each
OVERLAP_CASE = (24, 410)
PRODUCT_SIZE = 4096


def times_of(calls: dict[str, Callable[[int], None]], prepare: Callable[[], None] | None = None) -> dict[str, float]:
    """Median microseconds of call(i), i < VARIANTS, each after prepare(), all of them several times in a graph.

    One of two short calls would be over before the GPU is done with launching it: 0 us for the copy of two items.
    """

    def one(call: Callable[[int], None], i: int) -> None:
        call(i % VARIANTS)

    several = {name: partial(one, call) for name, call in calls.items()}
    return {name: time.median for name, time in time_together(several, REPEATS * VARIANTS, prepare).items()}


class State:
    """Shuffled tables of ``batch`` requests whose rows ask for whole blocks, ``misses`` tokens of which are absent."""

    def __init__(self, batch: int, misses: int, hot: int) -> None:
        import torch

        generator = torch.Generator("cuda").manual_seed(7)

        def orders(rows: int, count: int) -> Any:
            return torch.rand(rows, count, generator=generator, device="cuda").argsort(dim=1)

        self.batch, self.misses, self.hot = batch, misses, hot
        width, per_row = hot + PAGE_SIZE, TOP_K // BLOCK_TOKENS
        chosen = orders(batch, (SEQ_LEN - 1) // BLOCK_TOKENS)
        blocks = chosen[:, : VARIANTS * per_row].view(batch, VARIANTS, per_row)
        tokens = (blocks[..., None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device="cuda")).view(
            batch, VARIANTS, -1
        )
        mixed = tokens.gather(2, orders(batch * VARIANTS, TOP_K).view(batch, VARIANTS, -1))
        others = chosen[:, VARIANTS * per_row :, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device="cuda")
        held = torch.cat([mixed[..., misses:].flatten(1), others.flatten(1)], 1)[:, :hot]
        held = held.gather(1, orders(batch, hot))
        self.fresh_tokens = torch.nn.functional.pad(held, (0, PAGE_SIZE), value=-1).int()
        self.fresh_lru = orders(batch, hot).short()
        self.tokens, self.lru = self.fresh_tokens.clone(), self.fresh_lru.clone()
        self.blocks = blocks.transpose(0, 1).int().contiguous()
        self.top_k = mixed.gather(2, orders(batch * VARIANTS, TOP_K).view(batch, VARIANTS, -1))
        self.top_k = self.top_k.transpose(0, 1).int().contiguous()
        self.host_locs = torch.stack(
            [torch.randperm(HOST_ITEMS, generator=generator, device="cuda")[:SEQ_LEN] for _ in range(batch)]
        )
        self.locs = orders(1, batch * width).int().view(batch, width)
        self.out = torch.empty(batch, TOP_K, dtype=torch.int32, device="cuda")
        self.requests = torch.arange(batch, device="cuda")
        self.seq_lens = torch.full((batch,), SEQ_LEN, device="cuda")
        self.real_reqs = torch.full((1,), batch, dtype=torch.int32, device="cuda")

    def reset(self) -> None:
        self.tokens.copy_(self.fresh_tokens)
        self.lru.copy_(self.fresh_lru)

    def tables(self) -> dict[str, Any]:
        return {
            "device_buffer_tokens": self.tokens,
            "host_cache_locs": self.host_locs,
            "device_buffer_locs": self.locs,
            "top_k_device_locs": self.out,
            "req_pool_indices": self.requests,
            "seq_lens": self.seq_lens,
            "lru_slots": self.lru,
            "hot_buffer_size": self.hot,
            "page_size": PAGE_SIZE,
            "num_real_reqs": self.real_reqs,
        }

    def plan(self, variant: int, pools: Pools) -> dict[str, Any]:
        """The miss plan of a variant, as the swap-in records it."""
        import torch

        plan = {
            "miss_src": torch.zeros(self.batch, TOP_K, dtype=torch.int64, device="cuda"),
            "miss_dst": torch.zeros(self.batch, TOP_K, dtype=torch.int32, device="cuda"),
            "miss_count": torch.zeros(self.batch, dtype=torch.int32, device="cuda"),
        }
        self.reset()
        pools.swap_in(self, variant, 512, skip_io=True, **plan)
        if plan["miss_count"].tolist() != [self.misses] * self.batch:
            raise RuntimeError(f"planned {plan['miss_count'].tolist()} misses where {self.misses} were asked for")
        return plan


class Pools:
    """Items on both sides, of up to ``largest`` bytes, for tables of ``batch`` requests."""

    def __init__(self, batch: int, hot: int, largest: int = 1152) -> None:
        import torch

        self.host = torch.empty(HOST_ITEMS * largest, dtype=torch.uint8, pin_memory=True)
        self.host.view(torch.int32).random_()
        self.slots = batch * (hot + PAGE_SIZE)
        self.device = torch.zeros((self.slots + DSV4_PAGE_TOKENS) * largest, dtype=torch.uint8, device="cuda")

    def of(self, item: int) -> dict[str, Any]:
        return {"host_cache": self.host[: HOST_ITEMS * item], "device_buffer": self.device[: self.slots * item]}

    def pages(self) -> dict[str, Any]:
        def whole(pool: Any, tokens: int) -> Any:
            return pool[: -(-tokens // DSV4_PAGE_TOKENS) * DSV4_PAGE]

        return {"host_cache": whole(self.host, HOST_ITEMS), "device_buffer": whole(self.device, self.slots)}

    def swap_in(self, state: State, i: int, item: int, module: Any = hisparse, **options: Any) -> None:
        module.load_cache_to_device_buffer_mla(
            **state.tables(),
            **self.of(item),
            top_k_tokens=state.top_k[i],
            item_size_bytes=item,
            num_top_k=TOP_K,
            **options,
        )

    def swap_in_pages(self, state: State, i: int, module: Any = hisparse, **options: Any) -> None:
        module.load_cache_to_device_buffer_dsv4_mla(
            **state.tables(),
            **self.pages(),
            top_k_tokens=state.top_k[i],
            item_size_bytes=DSV4_ITEM,
            num_top_k=TOP_K,
            **options,
        )

    def swap_in_blocks(self, state: State, i: int, item: int, module: Any = hisparse, **options: Any) -> None:
        host, device = self.host.view(-1)[: 2 * HOST_ITEMS * item], self.device[: 2 * self.slots * item]
        keys, values = host.view(2, HOST_ITEMS, item)
        device_keys, device_values = device.view(2, self.slots, item)
        module.load_blocks_to_device_buffer_mha(
            **state.tables(),
            top_k_blocks=state.blocks[i],
            host_cache_k=keys,
            host_cache_v=values,
            device_buffer_k=device_keys,
            device_buffer_v=device_values,
            item_size_bytes=item,
            sparse_block_size=BLOCK_TOKENS,
            **options,
        )

    def planned(self, plan: dict[str, Any], real_reqs: Any, item: int, module: Any = hisparse, **options: Any) -> None:
        is_dsv4 = item == DSV4_ITEM
        pools = self.pages() if is_dsv4 else self.of(item)
        options = {"num_blocks": PLANNED_BLOCKS} | options
        module.copy_cache_planned_mla(
            **plan, **pools, num_real_reqs=real_reqs, item_size_bytes=item, is_dsv4_layout=is_dsv4, **options
        )

    def floor(self, plans: list[dict[str, Any]], item: int) -> tuple[Callable[[int], None], int]:
        """The plain copy of the same items, in rows, and the number of blocks that is best for it."""
        import torch

        listed = []
        for plan in plans:
            used = torch.arange(TOP_K, device="cuda")[None] < plan["miss_count"][:, None]
            listed.append((plan["miss_src"][used].contiguous(), plan["miss_dst"][used].long().contiguous()))
        pools = self.of(item)

        def copy(i: int, blocks: int) -> None:
            hisparse.copy_items(*pools.values(), *listed[i], item, blocks=blocks)

        times = times_of({str(blocks): partial(copy, blocks=blocks) for blocks in COPY_BLOCKS})
        best = int(min(times, key=lambda blocks: times[blocks]))
        return partial(copy, blocks=best), best


def swap_in_rows(peer: ModuleType | None, batches: tuple[int, ...], rates: tuple[float, ...]) -> list[dict[str, Any]]:
    """DSv4 beside the plain op at 584 bytes; blocks with keys and values of 512 bytes beside the plain op at 1024."""
    pools, rows = Pools(max(batches), max(HOT_BUFFERS)), []
    for hot, batch, rate in itertools.product(HOT_BUFFERS, batches, rates):
        state = State(batch, round(TOP_K * rate), hot)
        plans = [state.plan(i, pools) for i in range(VARIANTS)]
        calls: dict[str, dict[str, Callable[[int], None]]] = {
            "dsv4": {
                "us": partial(pools.swap_in_pages, state),
                "plain_us": partial(pools.swap_in, state, item=DSV4_ITEM),
            },
            "blocks": {
                "us": partial(pools.swap_in_blocks, state, item=512),
                "plain_us": partial(pools.swap_in, state, item=1024),
            },
        }
        if peer is not None:
            calls["dsv4"]["peer_us"] = partial(pools.swap_in_pages, state, module=peer, block_size=1024)
            calls["blocks"]["peer_us"] = partial(pools.swap_in_blocks, state, item=512, module=peer, block_size=1024)
        for op, named in calls.items():
            bytes_per_miss = DSV4_ITEM if op == "dsv4" else 1024
            row: dict[str, Any] = {"op": op, "hot_buffer_size": hot, "batch": batch, "miss_rate": rate}
            row["bytes_per_miss"] = bytes_per_miss
            if state.misses:
                named["floor_us"], row["floor_blocks"] = pools.floor(plans, bytes_per_miss)
            row |= times_of(named, state.reset)
            if state.misses:
                row["over_floor_us"] = row["us"] - row["floor_us"]
            rows.append(row)
            print(row, flush=True)
    return rows


def planned_rows(peer: ModuleType | None) -> list[dict[str, Any]]:
    """100 rows with 2 misses each, and few rows with 20 % misses, with 16 blocks."""
    hot = HOT_BUFFERS[0]
    pools, rows = Pools(max(batch for batch, _ in PLANNED_CASES), hot), []
    for batch, misses in PLANNED_CASES:
        state = State(batch, misses, hot)
        plans = [state.plan(i, pools) for i in range(VARIANTS)]

        def call(i: int, **options: Any) -> None:
            pools.planned(plans[i], state.real_reqs, **options)  # noqa: B023 (called before the next state)

        for item in (8, 512, 576, DSV4_ITEM, 656, 1152):
            named: dict[str, Callable[[int], None]] = {"us": partial(call, item=item)}
            if peer is not None:
                named["peer_us"] = partial(call, item=item, module=peer)
            row: dict[str, Any] = {"batch": batch, "misses": misses, "item": item, "blocks": PLANNED_BLOCKS}
            named["floor_us"], row["floor_blocks"] = pools.floor(plans, item)
            row |= times_of(named)
            row["over_floor"] = row["us"] / row["floor_us"]
            rows.append(row)
            print(row, flush=True)
    return rows


def overlap_rows() -> list[dict[str, Any]]:
    """A matrix product alone, and with a planned copy of 24 rows, 20 % misses, on a side stream."""
    import torch

    batch, misses = OVERLAP_CASE
    hot, item, size = HOT_BUFFERS[0], 512, PRODUCT_SIZE
    pools, state = Pools(batch, hot), State(batch, misses, hot)
    plan = state.plan(0, pools)
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    result = torch.empty_like(left)
    side = torch.cuda.Stream()

    def compute(_: int = 0) -> None:
        for _product in range(4):
            torch.matmul(left, right, out=result)

    def both(_: int, **options: Any) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            pools.planned(plan, state.real_reqs, item, **options)
        compute()
        torch.cuda.current_stream().wait_stream(side)

    rows = []
    for num_blocks in (4, 16):
        for block_size in (256, 1024):
            shape = {"num_blocks": num_blocks, "block_size": block_size}
            copy = partial(pools.planned, plan, state.real_reqs, item, **shape)
            named = {"compute_us": compute, "copy_us": lambda _, copy=copy: copy(), "both_us": partial(both, **shape)}
            row: dict[str, Any] = {"item": item, **shape, **times_of(named)}
            row["slower"] = row["both_us"] / row["compute_us"] - 1
            rows.append(row)
            print(row, flush=True)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", metavar="MODULE", help="a module with the same function names, timed in turns")
    parser.add_argument("--parts", default="swap_in,planned,overlap", help="which of these, separated by commas")
    parser.add_argument("--quick", action="store_true", help="fewer batches and miss rates")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file for all rows")


def run(options: argparse.Namespace) -> int:
    import importlib

    import torch

    if not torch.cuda.is_available():
        print("error: no GPU that torch can use")
        return 1
    peer = importlib.import_module(options.peer) if options.peer else None
    batches, rates = ((1, 100), (0.2, 0.0)) if options.quick else ((1, 4, 10, 24, 100), (0.2, 0.05, 0.001, 0.0))
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "swap_in": lambda: swap_in_rows(peer, batches, rates),
        "planned": lambda: planned_rows(peer),
        "overlap": overlap_rows,
    }
    warm_up()
    results = {part: parts[part]() for part in options.parts.split(",")}
    if options.out:
        options.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), **results}, indent=1) + "\n")
    return 0
