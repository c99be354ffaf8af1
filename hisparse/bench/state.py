"""The tensors of a swap-in that is measured, apart from the pools: one state serves every item size."""

from __future__ import annotations

from typing import Any

import hisparse

from .timing import device

TOP_K = 2048
SEQ_LEN = 32768
HOST_ITEMS = 1 << 19
PAGE_SIZE = 64
VARIANTS = 8  # different top-k sets per row, so that no host line is read twice in a row


class State:
    """Tables of ``batch`` requests, with a way to put them back, and top-k sets of ``misses`` misses each.

    With ``ordered`` tables, slots, LRU order and top-k sets are in order of their tokens, as after a prompt; else
    shuffled, as after many steps. A ``sequential`` host has the tokens of a request one after another; else every
    token has a random place. No two requests miss one item, but for a few of shuffled tables on a sequential host.
    """

    def __init__(self, hot_buffer_size: int, misses: int, batch: int, ordered: bool, sequential: bool) -> None:
        import torch

        self.hot_buffer_size, self.misses, self.batch = hot_buffer_size, misses, batch
        where = device()
        generator = torch.Generator(where).manual_seed(7)
        width = hot_buffer_size + PAGE_SIZE

        def orders(rows: int, count: int) -> Any:
            if ordered:
                return torch.arange(count, device=where).expand(rows, count)
            return torch.rand(rows, count, generator=generator, device=where).argsort(dim=1)

        order = orders(batch, SEQ_LEN - 1)
        resident, away = order[:, :hot_buffer_size], order[:, hot_buffer_size:]
        self.fresh_tokens = torch.nn.functional.pad(resident, (0, PAGE_SIZE), value=-1).int()
        self.fresh_lru = orders(batch, hot_buffer_size).short()
        self.tokens, self.lru = self.fresh_tokens.clone(), self.fresh_lru.clone()
        top_k = []
        for variant in range(VARIANTS):
            hits = resident.gather(1, orders(batch, hot_buffer_size)[:, : TOP_K - misses])
            missed = away[:, variant * misses : (variant + 1) * misses]
            top_k.append(torch.cat([hits, missed], dim=1).gather(1, orders(batch, TOP_K)))
        self.top_k = torch.stack(top_k).int()  # [variants, batch, TOP_K]

        # Requests start so far apart on the host that what they miss does not overlap.
        starts = torch.arange(batch, device=where)[:, None] * (HOST_ITEMS // batch)
        places = (starts + torch.arange(SEQ_LEN, device=where)) % HOST_ITEMS
        if sequential:
            self.host_locs = places.contiguous()
        else:
            shuffled = torch.randperm(HOST_ITEMS, generator=generator, device=where)
            self.host_locs = torch.zeros(batch, SEQ_LEN, dtype=torch.int64, device=where)
            self.host_locs.scatter_(1, order, shuffled[places[:, : SEQ_LEN - 1]])
        self.locs = orders(1, batch * width).int().reshape(batch, width)
        self.out = torch.empty(batch, TOP_K, dtype=torch.int32, device=where)
        self.requests = torch.arange(batch, device=where)
        self.seq_lens = torch.full((batch,), SEQ_LEN, device=where)
        self.real_reqs = torch.full((1,), batch, dtype=torch.int32, device=where)
        self._plans: list[tuple[Any, Any]] | None = None

    @property
    def device_items(self) -> int:
        return self.locs.numel()

    def reset(self) -> None:
        self.tokens.copy_(self.fresh_tokens)
        self.lru.copy_(self.fresh_lru)

    def arguments(self, variant: int, host_pool: Any, device_pool: Any, item_size_bytes: int) -> dict[str, Any]:
        return {
            "top_k_tokens": self.top_k[variant],
            "device_buffer_tokens": self.tokens,
            "host_cache_locs": self.host_locs,
            "device_buffer_locs": self.locs,
            "host_cache": host_pool,
            "device_buffer": device_pool,
            "top_k_device_locs": self.out,
            "req_pool_indices": self.requests,
            "seq_lens": self.seq_lens,
            "lru_slots": self.lru,
            "item_size_bytes": item_size_bytes,
            "num_top_k": TOP_K,
            "hot_buffer_size": self.hot_buffer_size,
            "page_size": PAGE_SIZE,
            "num_real_reqs": self.real_reqs,
        }

    def plans(self, host_pool: Any, device_pool: Any, item_size_bytes: int) -> list[tuple[Any, Any]]:
        """Per variant the host locs and device locs of all misses, as the op itself plans them."""
        import torch

        if self._plans is None:  # the same for all item sizes
            src = torch.zeros(self.batch, TOP_K, dtype=torch.int64, device=self.out.device)
            dst = torch.zeros_like(src, dtype=torch.int32)
            count = torch.zeros(self.batch, dtype=torch.int32, device=self.out.device)
            self._plans = []
            for variant in range(VARIANTS):
                self.reset()
                hisparse.load_cache_to_device_buffer_mla(
                    **self.arguments(variant, host_pool, device_pool, item_size_bytes),
                    miss_src=src,
                    miss_dst=dst,
                    miss_count=count,
                    skip_io=True,
                )
                missed = torch.arange(TOP_K, device=src.device)[None] < count[:, None]
                if int(count.sum()) != self.batch * self.misses:
                    raise RuntimeError(f"planned {count.tolist()} misses where {self.misses} were asked for")
                self._plans.append((src[missed].contiguous(), dst[missed].long().contiguous()))
            self.reset()
        return self._plans
