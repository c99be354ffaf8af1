"""The demo's batch of requests: a HotBufferCache, and the full KV cache that its results are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hisparse.arrays import Array, Arrays, NumpyArrays
from hisparse.hot_buffer_cache import HotBufferCache


@dataclass(frozen=True)
class Request:
    """A request whose KV is known in advance: float32 `items` [tokens, width], the first `prompt` of them prefilled."""

    name: str
    items: np.ndarray
    prompt: int


class DecodeBatch:
    """Requests of one layer in decode, one row each and a last row of padding."""

    def __init__(self, arrays: Arrays, requests: list[Request], top_k: int, hot_buffer: int) -> None:
        self.arrays, self.requests, self.top_k, self.hot_buffer = arrays, requests, top_k, hot_buffer
        page_size = 16
        self.cache = HotBufferCache(
            requests[0].items[0].nbytes,
            num_layers=1,
            max_requests=len(requests),
            hot_buffer_size=hot_buffer,
            top_k=top_k,
            host_tokens=sum(len(request.items) + page_size for request in requests),
            max_context=max(len(request.items) for request in requests),
            page_size=page_size,
            max_batch=len(requests) + 1,
            device="numpy" if isinstance(arrays, NumpyArrays) else arrays.device,
        )
        self.full_caches = [arrays.on_device(request.items) for request in requests]
        self._rids = [self.cache.admit(request.items[None, : request.prompt]) for request in requests]

    @property
    def lengths(self) -> np.ndarray:
        return np.array([self.cache.length(rid) for rid in self._rids])

    @property
    def device_buffer(self) -> Array:
        """float32 [locs, width]"""
        return self.cache.device_items(0).view(self.full_caches[0].dtype)

    def is_long(self, row: int) -> bool:
        return self.lengths[row] > self.hot_buffer

    def append(self) -> None:
        """One token more for every request. A model would compute its item on the device; here it is known."""
        self.cache.schedule(self._rids)
        self.cache.advance()
        positions = [self.cache.length(rid) - 1 for rid in self._rids]
        newest = [request.items[n] for request, n in zip(self.requests, positions, strict=True)]
        self.cache.append(0, self.arrays.on_device(np.stack(newest)))

    def swap_in(self, top_k_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Device locs [rows + 1, K] of the tokens and the number of misses per request."""
        locs = self.cache.swap_in(0, self.arrays.on_device(top_k_tokens))
        return self.arrays.to_numpy(locs), self.arrays.to_numpy(self.cache.miss_count(0))[: len(self.requests)]

    def slot_tokens(self, row: int) -> np.ndarray:
        return self.cache.slot_tokens(self._rids[row], 0)

    def slot_locs(self, row: int) -> np.ndarray:
        return self.cache.slot_locs(self._rids[row])

    def items(self, row: int) -> bytes:
        """All tokens of a request, as the cache holds them."""
        (items,) = self.cache.read(self._rids[row], 0)
        return np.asarray(items).tobytes()
