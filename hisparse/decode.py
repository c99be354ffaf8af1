"""What a serving engine owns around the swap-in op: pools, tables and the newest token of a batch of requests.

Written for the demo, over NumPy arrays on the CPU target or torch tensors on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import hisparse

Array = Any  # numpy.ndarray or torch.Tensor, whichever the arrays below make


class Arrays(Protocol):
    """The few array operations that differ between NumPy and torch."""

    device: str

    def on_device(self, values: np.ndarray) -> Array:
        """A copy in device memory."""

    def on_host(self, values: np.ndarray) -> Array:
        """A copy in host memory that the device can read and write."""

    def to_numpy(self, array: Array) -> np.ndarray:
        """The values, after everything that was launched before has run."""

    def gather(self, pool: Array, locs: np.ndarray, out: Array) -> Array:
        """Copies rows `locs` of a pool to `out`, in that order."""

    def exp(self, array: Array) -> Array: ...

    def same_bytes(self, left: Array, right: Array) -> bool: ...

    def synchronize(self) -> None: ...


class NumpyArrays:
    """NumPy arrays, for the CPU target. Host memory and device memory are the same."""

    device = "cpu"

    def on_device(self, values: np.ndarray) -> np.ndarray:
        return values.copy()

    on_host = on_device

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def gather(self, pool: np.ndarray, locs: np.ndarray, out: np.ndarray) -> np.ndarray:
        return np.take(pool, locs, axis=0, out=out, mode="clip")

    def exp(self, array: np.ndarray) -> np.ndarray:
        return np.exp(array)

    def same_bytes(self, left: np.ndarray, right: np.ndarray) -> bool:
        return np.array_equal(left.view(np.int32), right.view(np.int32))

    def synchronize(self) -> None:
        pass


class TorchArrays:
    """torch tensors on a GPU, CUDA or ROCm, with pinned host memory."""

    def __init__(self) -> None:
        try:
            import torch
        except ImportError as error:
            raise RuntimeError("--device cuda needs torch, which is not installed") from error
        if not torch.cuda.is_available():
            raise RuntimeError("--device cuda needs a GPU, and torch finds none")
        self.device = "cuda"
        self._torch = torch

    def on_device(self, values: np.ndarray) -> Array:
        return self._torch.from_numpy(values).to(self.device)

    def on_host(self, values: np.ndarray) -> Array:
        return self._torch.from_numpy(values).pin_memory()

    def to_numpy(self, array: Array) -> np.ndarray:
        self.synchronize()
        return array.cpu().numpy().copy()

    def gather(self, pool: Array, locs: np.ndarray, out: Array) -> Array:
        return self._torch.index_select(pool, 0, self.on_device(locs.astype(np.int64)), out=out)

    def exp(self, array: Array) -> Array:
        return self._torch.exp(array)

    def same_bytes(self, left: Array, right: Array) -> bool:
        return self._torch.equal(left.view(self._torch.int32), right.view(self._torch.int32))

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()


@dataclass(frozen=True)
class Request:
    """A request whose KV is known in advance: float32 `items` [tokens, width], the first `prompt` of them prefilled."""

    name: str
    items: np.ndarray
    prompt: int


class DecodeBatch:
    """Pools and tables of a batch in decode, one row per request and a last row of padding.

    The newest token's item is computed on the device, so it goes to the device buffer first: to slot `position` while
    the request still fits its hot buffer, from then on to slot H, which the LRU does not manage. When the next token
    comes, and before slot H is written again, it goes to the host cache, where the op finds it like any other token.
    """

    def __init__(self, arrays: Arrays, requests: list[Request], top_k: int, hot_buffer: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        table_rows, width = len(requests) + 1, requests[0].items.shape[1]
        most_tokens = max(len(request.items) for request in requests)
        self.arrays, self.requests, self.top_k, self.hot_buffer = arrays, requests, top_k, hot_buffer
        self.item_bytes = width * requests[0].items.itemsize
        self.lengths = np.array([request.prompt for request in requests])
        self.rids = rng.permutation(table_rows)[: len(requests)]

        # Locs are scattered, as an allocator leaves them after a while, and differ between host and device.
        self.host_locs = np.full((table_rows, most_tokens), -1, np.int64)
        scattered = rng.permutation(sum(len(request.items) for request in requests))
        self.device_locs = rng.permutation(table_rows * (hot_buffer + 1)).astype(np.int32).reshape(table_rows, -1)
        host_cache = np.full((len(scattered), width), np.nan, np.float32)
        device_buffer = np.full((self.device_locs.size, width), np.nan, np.float32)
        tokens = np.full((table_rows, hot_buffer + 1), -1, np.int32)
        for rid, request in zip(self.rids, requests, strict=True):
            self.host_locs[rid, : len(request.items)] = scattered[: len(request.items)]
            scattered = scattered[len(request.items) :]
            host_cache[self.host_locs[rid, : request.prompt]] = request.items[: request.prompt]
            if request.prompt <= hot_buffer:
                device_buffer[self.device_locs[rid, : request.prompt]] = request.items[: request.prompt]
                tokens[rid, : request.prompt] = np.arange(request.prompt)

        self.host_cache = arrays.on_host(host_cache)
        self.device_buffer = arrays.on_device(device_buffer)
        self.full_caches = [arrays.on_device(request.items) for request in requests]
        self._tokens = arrays.on_device(tokens)
        self._lru = arrays.on_device(np.tile(np.arange(hot_buffer, dtype=np.int16), (table_rows, 1)))
        self._host_locs = arrays.on_device(self.host_locs)
        self._device_locs = arrays.on_device(self.device_locs)
        # The padded row names the first request, whose state the op must leave alone.
        self._req_pool_indices = arrays.on_device(np.append(self.rids, self.rids[0]))
        self._num_real_reqs = arrays.on_device(np.array([len(requests)], np.int32))
        plan = np.zeros((table_rows, top_k))
        self._miss_src = arrays.on_device(plan.astype(np.int64))
        self._miss_dst = arrays.on_device(plan.astype(np.int32))
        self._miss_count = arrays.on_device(np.zeros(table_rows, np.int32))

    def newest_slot(self, row: int) -> int:
        return min(int(self.lengths[row]) - 1, self.hot_buffer)

    def is_long(self, row: int) -> bool:
        return self.lengths[row] > self.hot_buffer

    def append(self) -> None:
        """One token more for every request; the token that was the newest until now goes to the host cache."""
        self.back_up_newest()
        self.lengths += 1
        for row, rid in enumerate(self.rids):
            position, slot = int(self.lengths[row]) - 1, self.newest_slot(row)
            self.device_buffer[int(self.device_locs[rid, slot])] = self.full_caches[row][position]
            if not self.is_long(row):
                self._tokens[int(rid), slot] = position

    def back_up_newest(self) -> None:
        """Device to host, of newest tokens that were computed here. The prompts are in the host cache already."""
        computed = [row for row, request in enumerate(self.requests) if self.lengths[row] > request.prompt]
        rids = self.rids[computed]
        slots = [self.newest_slot(row) for row in computed]
        device_locs = self.device_locs[rids, slots].astype(np.int64)
        host_locs = self.host_locs[rids, self.lengths[computed] - 1]
        on_device = self.arrays.on_device
        hisparse.copy_items(
            self.device_buffer, self.host_cache, on_device(device_locs), on_device(host_locs), self.item_bytes
        )

    def slot_tokens(self, row: int) -> np.ndarray:
        """int32 [H]: the token in each slot that the LRU manages, -1 where there is none."""
        return self.arrays.to_numpy(self._tokens[int(self.rids[row])])[: self.hot_buffer]

    def swap_in(self, top_k_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Device locs [rows + 1, K] of the tokens and the number of misses per request."""
        arrays = self.arrays
        tokens = arrays.on_device(top_k_tokens)
        top_k_device_locs = arrays.on_device(np.full_like(top_k_tokens, 123456))
        hisparse.load_cache_to_device_buffer_mla(
            tokens,
            self._tokens,
            self._host_locs,
            self._device_locs,
            self.host_cache,
            self.device_buffer,
            top_k_device_locs,
            self._req_pool_indices,
            arrays.on_device(np.append(self.lengths, 1).astype(np.int32)),
            self._lru,
            self.item_bytes,
            self.top_k,
            self.hot_buffer,
            num_real_reqs=self._num_real_reqs,
            miss_src=self._miss_src,
            miss_dst=self._miss_dst,
            miss_count=self._miss_count,
        )
        arrays.synchronize()
        return arrays.to_numpy(top_k_device_locs), arrays.to_numpy(self._miss_count)[: len(self.requests)]
