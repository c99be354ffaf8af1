"""A long decode: swap-ins of a large batch, one after the other on one state, in CUDA graphs where there is a GPU.

    python tests/load.py                      100,000 steps of 100 requests on a GPU
    python tests/load.py --device cpu --steps 200 --batch 8 --top-k 64 --hot-buffer 128 --tokens 2000

At each step some of the selected positions are others, drawn anew, most of them near the beginning, as attention
sinks are; the sequences grow by a token, and start again when they have reached their end; some rows are padding, two
are short. Every 1000th step is compared with a reference in torch, which is written from the contract and works on
whole batches, and the bytes of every slot of every request with the items of the tokens that they hold. Memory has to
stay what it was after the second such step. Prints one line of JSON; exits with 1 where something differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import hisparse

SHORT_ROWS = 2
MOST_PADDING = 4  # rows


@dataclass(frozen=True)
class Load:
    device: str = "cuda"
    steps: int = 100_000
    batch: int = 100
    top_k: int = 2048
    hot_buffer: int = 4096
    item_bytes: int = 512
    tokens: int = 32_768  # most of a request
    host_items: int = 1 << 19
    changes: float = 0.1  # share of the selected positions that a step draws anew
    verify_every: int = 1000
    seed: int = 1


def expected_step(
    top_k: torch.Tensor,
    tokens: torch.Tensor,
    lru: torch.Tensor,
    locs: torch.Tensor,
    host_locs: torch.Tensor,
    seq_lens: torch.Tensor,
    real: int,
) -> dict[str, Any]:
    """What a step makes of rows 0 .. B-1 of the tables, for a whole batch at once; from the contract alone.

    `tokens` and `lru` are [B, H], `locs` [B, H + 1]; the first `real` rows are no padding.
    """
    batch, hot = tokens.shape
    top_k, tokens, lru, locs = top_k.long(), tokens.long(), lru.long(), locs.long()
    seq_lens = seq_lens.long()[:, None]
    rows = torch.arange(batch, device=tokens.device)[:, None]
    is_real, is_long = rows < real, seq_lens > hot
    newest = seq_lens - 1
    wanted = is_real & is_long & (top_k >= 0) & (top_k < newest)
    width = max(host_locs.shape[1], hot) + 1  # the last column takes what belongs nowhere

    def column(values, where):
        return torch.where(where, values, width - 1)

    # A dense map of each row from tokens to slots.
    slot_of = torch.full((batch, width), -1, device=tokens.device)
    held = (tokens >= 0) & (tokens < width - 1)
    slot_of.scatter_(1, column(tokens, held), torch.arange(hot, device=tokens.device).expand(batch, -1))
    slot_of[:, -1] = -1
    asked = column(top_k, wanted)
    slots = slot_of.gather(1, asked)
    hit_slots = torch.zeros(batch, hot + 1, dtype=torch.bool, device=tokens.device)
    hit_slots.scatter_(1, torch.where(slots >= 0, slots, hot), True)
    hit_slots = hit_slots[:, :hot]

    places = torch.arange(top_k.shape[1], device=tokens.device).expand(batch, -1)
    first = torch.full((batch, width), width, device=tokens.device).scatter_reduce_(1, asked, places, "amin")
    is_miss = wanted & (slots < 0) & (first.gather(1, asked) == places)
    misses = is_miss.sum(1, keepdim=True)

    hit_in_order = hit_slots.gather(1, lru)
    free = (~hit_in_order).sum(1, keepdim=True)
    rank = (~hit_in_order).cumsum(1) - 1  # of free slots, in LRU order
    free_slots = torch.zeros(batch, hot + 1, dtype=torch.long, device=tokens.device)
    free_slots.scatter_(1, torch.where(hit_in_order, hot, rank), lru)
    miss_rank = is_miss.cumsum(1) - 1
    filled = free_slots.gather(1, miss_rank.clamp(0, hot - 1))

    new_tokens = torch.nn.functional.pad(tokens, (0, 1))
    new_tokens.scatter_(1, torch.where(is_miss, filled, hot), torch.where(is_miss, top_k, 0))
    slot_of.scatter_(1, column(top_k, is_miss), filled)
    position = torch.where(rank < misses, free - misses + rank, rank - misses)
    position = torch.where(hit_in_order, free + hit_in_order.cumsum(1) - 1, position)
    new_lru = torch.empty_like(lru).scatter_(1, position, lru)

    in_long = torch.where(top_k == newest, hot, torch.where(wanted, slot_of.gather(1, asked), -1))
    in_short = torch.where((top_k >= 0) & (top_k < seq_lens), top_k, -1)
    slots = torch.where(is_long, in_long, in_short)
    output = torch.where((slots >= 0) & is_real, locs.gather(1, slots.clamp(0, hot)), -1)

    planned = torch.argsort((~is_miss).long(), dim=1, stable=True)  # misses first, in the order of the row
    miss_src = host_locs.gather(1, torch.where(is_miss, top_k, 0)).gather(1, planned)
    miss_dst = locs.gather(1, torch.where(is_miss, filled, 0)).gather(1, planned)
    return {
        "top_k_device_locs": output,
        "device_buffer_tokens": new_tokens[:, :hot],
        "lru_slots": new_lru,
        "miss_count": misses[:, 0],
        "miss_src": miss_src,
        "miss_dst": miss_dst,
    }


class Decode:
    """The tensors of all requests at addresses that stay, and what a step does to them."""

    def __init__(self, load: Load):
        self.load, device = load, load.device
        batch, hot, top_k = load.batch, load.hot_buffer, load.top_k
        torch.manual_seed(load.seed)
        host = torch.randint(0, 256, (load.host_items, load.item_bytes), dtype=torch.uint8)
        self.host_cache = host.pin_memory() if device == "cuda" else host
        self.host_items = host.to(device)  # for the verification
        self.device_buffer = torch.zeros(batch * (hot + 1), load.item_bytes, dtype=torch.uint8, device=device)
        self.locs = torch.randperm(batch * (hot + 1), device=device).int().view(batch, hot + 1)
        self.host_locs = torch.randint(0, load.host_items, (batch, load.tokens), device=device)
        self.slot_tokens = torch.full((batch, hot + 1), -1, dtype=torch.int32, device=device)
        self.lru = torch.rand(batch, hot, device=device).argsort(1).short()
        self.requests = torch.arange(batch, device=device)
        first, last = hot + 1, load.tokens
        self.seq_lens = torch.randint(first, last + 1, (batch,), device=device)
        self.seq_lens[:SHORT_ROWS] = torch.tensor([hot, max(hot // 2, 1)])[: min(SHORT_ROWS, batch)]
        self.grows = torch.arange(batch, device=device) >= SHORT_ROWS
        in_order = torch.arange(hot, device=device, dtype=torch.int32)
        self.slot_tokens[:SHORT_ROWS, :hot] = in_order
        for row in range(min(SHORT_ROWS, batch)):
            self.device_buffer[self.locs[row, :hot].long()] = self.host_items[self.host_locs[row, :hot]]

        self.top_k = self.draw(top_k).contiguous()
        self.columns = torch.arange(max(1, round(load.changes * top_k)), device=device)
        self.output = torch.empty(batch, top_k, dtype=torch.int32, device=device)
        self.real = torch.full((1,), batch, dtype=torch.int32, device=device)
        self.miss_src = torch.zeros(batch, top_k, dtype=torch.int64, device=device)
        self.miss_dst = torch.zeros(batch, top_k, dtype=torch.int32, device=device)
        self.miss_count = torch.zeros(batch, dtype=torch.int32, device=device)
        self.totals = torch.zeros(2, dtype=torch.int64, device=device)  # rows that were real, misses

    def draw(self, count: int) -> torch.Tensor:
        """Positions of every request, [batch, count], more of them near the beginning."""
        share = torch.rand(self.load.batch, count, device=self.load.device) ** 1.5
        return (share * (self.seq_lens[:, None] - 1)).int()

    def select(self) -> None:
        """What comes before a swap-in: a token more, its item in its slot, and another selection."""
        first, last, hot = self.load.hot_buffer + 1, self.load.tokens, self.load.hot_buffer
        longer = torch.where(self.seq_lens >= last, first, self.seq_lens + 1)
        self.seq_lens.copy_(torch.where(self.grows, longer, self.seq_lens))
        newest = self.seq_lens[:, None] - 1
        self.device_buffer.index_copy_(
            0, self.locs[:, hot].long(), self.host_items[self.host_locs.gather(1, newest)[:, 0]]
        )
        self.columns.add_(len(self.columns)).remainder_(self.load.top_k)
        self.top_k.index_copy_(1, self.columns, self.draw(len(self.columns)))
        self.top_k[:, 0].copy_(newest[:, 0])
        self.top_k[:, -1].fill_(-1)
        self.real.copy_(self.load.batch - (self.columns[:1] + self.totals[:1]) % MOST_PADDING)

    def swap_in(self) -> None:
        hisparse.load_cache_to_device_buffer_mla(
            top_k_tokens=self.top_k,
            device_buffer_tokens=self.slot_tokens,
            host_cache_locs=self.host_locs,
            device_buffer_locs=self.locs,
            host_cache=self.host_cache,
            device_buffer=self.device_buffer,
            top_k_device_locs=self.output,
            req_pool_indices=self.requests,
            seq_lens=self.seq_lens,
            lru_slots=self.lru,
            item_size_bytes=self.load.item_bytes,
            num_top_k=self.load.top_k,
            hot_buffer_size=self.load.hot_buffer,
            block_size=1024 if self.load.device == "cuda" else 256,
            num_real_reqs=self.real,
            miss_src=self.miss_src,
            miss_dst=self.miss_dst,
            miss_count=self.miss_count,
        )

    def count(self) -> None:
        is_real = self.requests < self.real
        self.totals[0] += is_real.sum()
        self.totals[1] += (self.miss_count * is_real).sum()

    def expected(self) -> dict[str, Any]:
        hot = self.load.hot_buffer
        tables = (self.slot_tokens[:, :hot], self.lru, self.locs, self.host_locs, self.seq_lens)
        return expected_step(self.top_k, *tables, int(self.real[0]))

    def differences(self, expected: dict[str, Any]) -> list[str]:
        """What of the state after a swap-in is not as it should be."""
        hot, real = self.load.hot_buffer, int(self.real[0])
        found = []

        def compare(name, got, want):
            wrong = (got.long() != want).nonzero()
            if len(wrong):
                found.append(f"{name}: {len(wrong)} entries differ, the first at {wrong[0].tolist()}")

        compare("top_k_device_locs", self.output, expected["top_k_device_locs"])
        compare("device_buffer_tokens", self.slot_tokens[:, :hot], expected["device_buffer_tokens"])
        compare("lru_slots", self.lru, expected["lru_slots"])
        compare("miss_count", self.miss_count[:real], expected["miss_count"][:real])
        counts = expected["miss_count"][:real, None]
        planned = torch.arange(self.load.top_k, device=counts.device) < counts
        for name, got in (("miss_src", self.miss_src), ("miss_dst", self.miss_dst)):
            compare(name, torch.where(planned, got[:real], 0), torch.where(planned, expected[name][:real], 0))
        for row in range(self.load.batch):
            tokens = self.slot_tokens[row, :hot].long()
            slots = (tokens >= 0).nonzero()[:, 0]
            if row < SHORT_ROWS:
                slots = slots[slots < self.seq_lens[row]]
            held = self.device_buffer[self.locs[row, slots].long()]
            items = self.host_items[self.host_locs[row, tokens[slots]]]
            if not torch.equal(held, items):
                found.append(f"device_buffer: slots of row {row} do not hold the bytes of their tokens")
        return found


def captured(function: Callable[[], None], device: str) -> Callable[[], None]:
    """The function as a graph to replay, after it has run once; on the CPU the function itself."""
    if device != "cuda":
        return function
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def memory(device: str) -> dict[str, int]:
    """Bytes in use: of this process on the host, of torch and of the whole GPU on the device."""
    with open("/proc/self/statm") as file:
        used = {"host_resident": int(file.read().split()[1]) * 4096}
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used |= {"torch_allocated": torch.cuda.memory_allocated(), "gpu": total - free}
    return used


def memory_differences(growth: dict[str, int], alone: bool) -> list[str]:
    """What has grown that should not. The whole GPU's memory counts where no other process uses it."""
    found = []
    if growth.get("torch_allocated", 0) > 0 or (alone and growth.get("gpu", 0) > 1 << 20):
        found.append(f"device memory grew: {growth}")
    if growth["host_resident"] > 64 << 20:
        found.append(f"host memory grew: {growth}")
    return found


def run(load: Load, alone: bool = False) -> dict[str, Any]:
    decode = Decode(load)
    select, swap_in, count = (
        captured(function, load.device) for function in (decode.select, decode.swap_in, decode.count)
    )
    verified, differences, before = 0, [], {}
    started = time.monotonic()
    for step in range(load.steps):
        select()
        if step % load.verify_every:
            swap_in()
        else:
            expected = decode.expected()
            swap_in()
            differences += [f"step {step}: {difference}" for difference in decode.differences(expected)]
            verified += 1
            del expected
            if verified <= 2:  # by the second, slots are full and all of torch's kernels are loaded
                before = memory(load.device)
            if differences:
                break
        count()
    after = memory(load.device)
    seconds = time.monotonic() - started
    rows, misses = decode.totals.tolist()
    growth = {name: after[name] - before[name] for name in after}
    differences += memory_differences(growth, alone)
    return {
        "device": torch.cuda.get_device_name() if load.device == "cuda" else "CPU target",
        "steps": step + 1,
        "batch": load.batch,
        "top_k": load.top_k,
        "hot_buffer": load.hot_buffer,
        "item_bytes": load.item_bytes,
        "requests_served": rows,
        "items_copied": misses,
        "miss_rate": round(misses / max(rows * load.top_k, 1), 4),
        "verified_steps": verified,
        "seconds": round(seconds, 1),
        "memory_growth_bytes": growth,
        "differences": differences,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Load()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    result = run(Load(**vars(parser.parse_args(argv))), alone=True)
    print(json.dumps(result))
    return 1 if result["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
