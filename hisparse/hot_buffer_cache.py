"""One object that holds the KV cache of many requests: all tokens in host memory, the hot buffers on the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from hisparse.arrays import Array, arrays_for
from hisparse.cache_arguments import at_least_one, leaders_of_layers
from hisparse.cache_statistics import Counters, Statistics
from hisparse.host_pages import CapacityError, HostPages
from hisparse.kv_pools import POOLS, Tables
from hisparse.presets import ItemFormat, item_format
from hisparse.trace import recorder

__all__ = ["CapacityError", "HotBufferCache"]

_MAX_HOT_BUFFER = 32768


class HotBufferCache:
    """The KV cache of many requests and layers, for decoding with sparse attention.

    The host pool holds every token. On the device each request has a hot buffer of H slots a layer, and one slot more
    for its newest token. A decode step is::

        cache.schedule(requests)             # on the host: which requests get one token more
        cache.advance()                      # on the device, once a step
        for layer in range(num_layers):
            cache.append(layer, items)       # the newest tokens' items, in the order of the requests
            locs = cache.swap_in(layer, top_k)
            attention(query, cache.device_items(layer), locs)

    All of it but ``schedule`` can be captured in a CUDA graph once, for a number of rows B, and replayed for any
    requests: rows past the scheduled requests are padding. ``schedule`` is called before each replay, and waits for
    nothing.

    A request of at most H tokens lies in its hot buffer as a whole, token p in slot p. From H + 1 tokens on, the newest
    token is in slot H, and the others are where the LRU put them. The item of a token that is no longer the newest is
    in the host pool: ``advance`` copies it there before its slot can be taken.

    Args:
        item: What a token has in a layer: the name of a preset (``hisparse.presets.PRESETS``), an ``ItemFormat``, or a
            number of bytes.
        num_layers: Layers. They share the requests and the places of their tokens; each has its own pools, and its own
            slots and LRU unless ``index_layers`` says otherwise.
        max_requests: Requests that the device has hot buffers for.
        hot_buffer_size: H, slots a request and layer that the LRU manages, up to 32768.
        top_k: K, entries of a selection: tokens, or blocks of ``item.block_tokens`` tokens. All their tokens fit in H.
        host_tokens: Tokens that the host pool holds, of all requests together; rounded up to whole pages.
        max_context: The length that a request may reach; None for ``host_tokens``. It costs 8 bytes of device memory
            per token and request.
        page_size: Tokens of a page; the host pool is given to requests by pages.
        max_batch: Rows of a step; None for ``max_requests``.
        index_layers: For each layer, the layer whose selection it uses: itself, or an earlier one that uses its own. A
            layer that uses another's replays its copies. None: each its own. Not for the "key value" layout.
        device: A GPU or "cpu", as torch names them; None for a GPU where torch finds one, or else the CPU; "numpy" for
            NumPy arrays on the CPU target, without torch.
        block_size: Threads per block, a hint to the op.
        statistics: Count reads and misses on the device, three small kernels a swap-in.
        timing: Measure the time of each swap-in as well; on a GPU with events, outside of graphs only.

    One thread at a time may call it, and all calls go to one stream, or are ordered by the caller's events.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value, which the message names.
        RuntimeError: The device is not there.
    """

    def __init__(
        self,
        item: ItemFormat | str | int,
        *,
        num_layers: int,
        max_requests: int,
        hot_buffer_size: int,
        top_k: int,
        host_tokens: int,
        max_context: int | None = None,
        page_size: int = 1,
        max_batch: int | None = None,
        index_layers: Sequence[int] | None = None,
        device: Any = None,
        block_size: int = 256,
        statistics: bool = True,
        timing: bool = False,
    ) -> None:
        self.item = item_format(item)
        self.num_layers = at_least_one("num_layers", num_layers)
        self.max_requests = at_least_one("max_requests", max_requests)
        self.hot_buffer_size = at_least_one("hot_buffer_size", hot_buffer_size)
        self.top_k = at_least_one("top_k", top_k)
        self.page_size = at_least_one("page_size", page_size)
        self.max_batch = at_least_one("max_batch", max_requests if max_batch is None else max_batch)
        self._pages = HostPages(at_least_one("host_tokens", host_tokens), self.page_size)
        self.host_tokens = self._pages.count * self.page_size
        self.max_context = at_least_one("max_context", self.host_tokens if max_context is None else max_context)
        if hot_buffer_size > _MAX_HOT_BUFFER:
            raise ValueError(f"hot_buffer_size: expected at most {_MAX_HOT_BUFFER}, got {hot_buffer_size}")
        if top_k * self.item.block_tokens > hot_buffer_size:
            raise ValueError(
                f"hot_buffer_size: expected at least the {top_k * self.item.block_tokens} tokens of a selection, "
                f"got {hot_buffer_size}"
            )
        slots, rows = hot_buffer_size + 1, max_requests + 1
        if max_requests * slots >= 2**31:
            raise ValueError(f"max_requests: {max_requests} hot buffers of {slots} slots pass the int32 of device locs")
        pools = POOLS[self.item.layout]
        self.index_layers = leaders_of_layers(index_layers, num_layers, pools.records_misses)
        self._leaders = sorted(set(self.index_layers))
        self._block_size = block_size

        self._arrays = arrays = arrays_for(device)
        self.device = arrays.device
        self._pools = pools(arrays, self.item, num_layers, self.host_tokens, max_requests * slots + 1)
        # Padding has the last row of every table. Its tokens have no place in the host pool, its slots are one spare
        # item of the device pool.
        device_locs = np.append(np.arange(max_requests * slots), np.full(slots, max_requests * slots))
        self._device_locs = arrays.on_device(device_locs.astype(np.int32).reshape(rows, slots))
        self._host_locs = arrays.full((rows, -(-self.max_context // page_size) * page_size), -1, "int64")
        self._tokens = arrays.full((len(self._leaders), rows, slots), -1, "int32")
        self._lru_order = arrays.on_device(np.arange(hot_buffer_size, dtype=np.int16))
        self._lru = arrays.full((len(self._leaders), rows, hot_buffer_size), 0, "int16")
        self._lru[:] = self._lru_order
        self._counters = Counters(arrays, len(self._leaders), self.max_batch, statistics, timing)
        # A layer whose plan others replay keeps it for itself until the next step.
        shared = self._new_plan()
        self._plans = [shared if self.index_layers.count(n) == 1 else self._new_plan() for n in self._leaders]
        self._last: dict[int, Tables] = {}

        # What a graph reads: rows of the tables, lengths, and the number of requests in the step, sent in one copy.
        self._step = arrays.full((2 * self.max_batch + 1,), 0, "int32")
        self._rids, self._seq_lens = self._step[: self.max_batch], self._step[self.max_batch : -1]
        self._num_real_reqs = self._step[-1:]
        self._newest_locs = arrays.full((self.max_batch,), max_requests * slots, "int64")
        self._new_pages = arrays.full((3 * self.max_batch,), 0, "int64")

        self._lengths: dict[int, int] = {}
        self._prompts = [0] * max_requests
        self._free_requests = list(range(max_requests))[::-1]
        self._admissions, self._admission_of = 0, [0] * max_requests
        self._scheduled: list[int] = []
        self._backed_up = 0
        self._send()

    # Requests

    @property
    def requests(self) -> list[int]:
        """The admitted requests."""
        return list(self._lengths)

    @property
    def free_requests(self) -> int:
        """Requests that can still be admitted."""
        return len(self._free_requests)

    @property
    def free_host_tokens(self) -> int:
        """Tokens that the free pages of the host pool hold."""
        return self._pages.free * self.page_size

    def length(self, request: int) -> int:
        """Tokens of a request, the newest one included."""
        self._check_request(request)
        return self._lengths[request]

    @property
    def rows(self) -> Array:
        """int32 [max_batch] on the device, for graphs: the request of each row, ``max_requests`` for padding."""
        return self._rids

    @property
    def seq_lens(self) -> Array:
        """int32 [max_batch] on the device, for graphs: each row's length, the newest token included; 1 for padding."""
        return self._seq_lens

    def reserve(self, length: int) -> int:
        """Admits a request with a prompt of ``length`` tokens, whose items come with :meth:`write`.

        Returns:
            The request, a number below ``max_requests``; after :meth:`release` it may be given to another.

        Raises:
            CapacityError: No free request, not enough free pages in the host pool, or ``length`` is above
                ``max_context``. Nothing is changed.
        """
        at_least_one("length", length)
        self._check_context(length)
        if not self._free_requests:
            raise CapacityError("requests", 1, 0)
        pages = self._pages.take(-(-length // self.page_size))
        request = self._free_requests.pop()
        self._pages.assign(request, pages)
        self._lengths[request] = self._prompts[request] = length
        self._admissions += 1
        self._admission_of[request] = self._admissions
        locs = self._pages.locs_of(pages)
        self._arrays.upload(locs, self._host_locs[request, : len(locs)])
        self._tokens[:, request] = -1
        self._lru[:, request] = self._lru_order
        if length <= self.hot_buffer_size:
            self._tokens[:, request, :length] = self._arrays.as_type(self._arrays.arange(length), "int32")
        return request

    def write(self, request: int, layer: int, *items: Array, start: int = 0) -> None:
        """Items of the tokens ``start``, ``start + 1``, ... of a prompt, in one layer, to where they belong.

        The host pool gets them all; the device those that it has a slot for: all of them where the prompt is at most H
        tokens long, or else its last. All layers of a prompt have to be written before its first step, in any order.

        Args:
            items: One tensor, or keys and values, [tokens, ...] with ``item_size_bytes`` bytes a token. Tensors from
                elsewhere go to the device first.
        """
        self._check_request(request)
        self._check_layer(layer)
        parts = self._parts(items)
        count, length = len(parts[0]), self._prompts[request]
        if self._lengths[request] > length:
            raise ValueError(
                f"request: {request} has decoded {self._lengths[request] - length} tokens after its prompt"
            )
        if not 0 <= start <= length - count:
            raise ValueError(f"start: {count} tokens from {start} on are not inside the prompt of {length} tokens")
        if count == 0:
            return
        self._pools.write_host(layer, self._host_locs[request, start : start + count], parts)
        if length <= self.hot_buffer_size:
            locs, on_device = self._device_locs[request, start : start + count], parts
        elif start + count == length:
            locs, on_device = self._device_locs[request, self.hot_buffer_size :][:1], [part[-1:] for part in parts]
        else:
            return
        self._pools.write_device(layer, self._arrays.as_type(locs, "int64"), on_device)

    def admit(self, *items: Array) -> int:
        """:meth:`reserve` and :meth:`write` of a whole prompt in all layers.

        Args:
            items: One tensor, or keys and values, [num_layers, tokens, ...] with ``item_size_bytes`` bytes a token.
        """
        if any(len(part) != self.num_layers for part in items):
            raise ValueError(f"items: expected {self.num_layers} layers, got {[len(part) for part in items]}")
        request = self.reserve(self._count([part[0] for part in items]))
        try:
            for layer in range(self.num_layers):
                self.write(request, layer, *(part[layer] for part in items))
        except BaseException:
            self.release(request)
            raise
        return request

    def release(self, request: int) -> None:
        """Gives the request's hot buffers and its pages of the host pool to others."""
        self._check_request(request)
        del self._lengths[request]
        self._pages.give_back(request)
        self._free_requests.append(request)

    def read(self, request: int, layer: int) -> tuple[Array, ...]:
        """Copies of all items of a request in one layer: uint8 [length, item_size_bytes], on the CPU, or two of them.

        Waits for the stream. For moving a request elsewhere, and for checks.
        """
        self._check_request(request)
        self._check_layer(layer)
        self._arrays.synchronize()
        length = self._lengths[request]
        slot = min(length - 1, self.hot_buffer_size)
        newest = np.array([request * (self.hot_buffer_size + 1) + slot])
        parts = self._pools.read_host(layer, self._pages.locs(request)[:length])
        for part, item in zip(parts, self._pools.read_device(layer, newest), strict=True):
            part[length - 1 : length] = self._arrays.on_cpu(item)
        return tuple(parts)

    # A decode step

    def schedule(self, requests: Sequence[int]) -> None:
        """The requests of the next step, in the order of its rows. Each becomes one token longer.

        Raises:
            ValueError: A request stands twice, is not admitted, or there are more than ``max_batch``.
            CapacityError: The host pool has not enough free pages, or a request is at ``max_context``. Nothing is
                changed: release or leave out a request, and call it again.

        The step that it is for has to run before the next call: ``advance`` backs up one token a request.
        """
        if len(requests) > self.max_batch:
            raise ValueError(f"requests: expected at most max_batch = {self.max_batch}, got {len(requests)}")
        if len(set(requests)) < len(requests):
            raise ValueError(f"requests: each may stand there once, got {list(requests)}")
        for request in requests:
            self._check_request(request)
            self._check_context(self._lengths[request] + 1)
        growing = [request for request in requests if self._lengths[request] % self.page_size == 0]
        pages = self._pages.take(len(growing))
        if growing:
            self._add_pages(growing, pages)
        for request in requests:
            self._lengths[request] += 1
        self._backed_up += len(requests)
        self._scheduled = list(requests)
        self._send()

    def advance(self) -> None:
        """Copies the tokens that were the newest to the host pool, in all layers, and makes room for the new ones.

        Can be repeated without harm, as a warm-up before the capture of a graph does.
        """
        as_type, slots = self._arrays.as_type, self.hot_buffer_size
        rids, newest = as_type(self._rids, "int64"), as_type(self._seq_lens, "int64") - 1
        before, slot = (newest - 1).clip(0), newest.clip(0, slots)
        self._pools.back_up(
            as_type(self._device_locs[rids, before.clip(0, slots)], "int64"), self._host_locs[rids, before]
        )
        self._tokens[:, rids, slot] = as_type(newest, "int32")
        self._newest_locs[:] = self._device_locs[rids, slot]
        self._counters.next_step()

    def append(self, layer: int, *items: Array) -> None:
        """The items of the newest tokens, in one layer; before its :meth:`swap_in`.

        Args:
            items: One tensor, or keys and values, on the device: [B, ...] with ``item_size_bytes`` bytes a row.
        """
        self._check_layer(layer)
        parts = self._parts(items)
        self._check_rows("items", len(parts[0]))
        self._pools.write_device(layer, self._newest_locs[: len(parts[0])], parts)

    def swap_in(self, layer: int, top_k: Array | None = None) -> Array:
        """The device locs of the tokens that attention reads in one layer, whose items are then in their places.

        Args:
            top_k: int32 [B, >= K] on the device, the positions (or blocks) that each row picked, -1 for an unused
                entry; None for a layer that uses another's selection.

        Returns:
            int32 [B, K] or [B, K * block_tokens], rows of :meth:`device_items`, -1 where an entry has no token, and in
            all rows of padding.
        """
        self._check_layer(layer)
        leader = self.index_layers[layer]
        if leader != layer:
            if top_k is not None:
                raise ValueError(f"top_k: layer {layer} uses the selection of layer {leader}, expected None")
            if leader not in self._last:
                raise RuntimeError(f"layer {leader}, whose selection layer {layer} uses, was not swapped in before")
            self._pools.replay(layer, self._last[leader])
            return self._last[leader].out
        if top_k is None:
            raise ValueError(f"top_k: layer {layer} has a selection of its own, expected int32 [B, {self.top_k}]")
        index = self._leaders.index(layer)
        tables = self._tables(index, top_k)
        with self._counters.swap_in(index, tables, self._pools.records_misses):
            self._pools.swap_in(layer, tables)
        self._last[layer] = tables
        if recorder.is_active():
            self._record(layer, top_k)
        return tables.out

    def device_items(self, layer: int) -> Array | tuple[Array, Array]:
        """The device pool of a layer, which the locs of :meth:`swap_in` are rows of.

        uint8 [locs, item_size_bytes]; for the "key value" layout two of them; for "dsv4" uint8 [pages, 37440], of which
        loc l is token l % 64 of page l // 64. ``item.split`` makes fields of rows.
        """
        self._check_layer(layer)
        pools = [pool[layer] for pool in self._pools.device]
        return pools[0] if len(pools) == 1 else (pools[0], pools[1])

    # Numbers

    def statistics(self, wait: bool = True) -> Statistics:
        """What was counted up to now.

        Args:
            wait: True waits for the stream. False never waits: the numbers are those of an earlier moment, at most as
                old as the call before.
        """
        token_bytes = self.item.token_bytes
        index_of_layer = [self._leaders.index(leader) for leader in self.index_layers]
        return self._counters.read(wait, index_of_layer, token_bytes, self._backed_up * self.num_layers * token_bytes)

    def miss_count(self, layer: int) -> Array:
        """int32 [max_batch] on the device: misses of each row in the layer's swap-in of this step."""
        self._check_layer(layer)
        return self._counters.miss_count[self._leaders.index(self.index_layers[layer])]

    def slot_tokens(self, request: int, layer: int) -> np.ndarray:
        """int32 [H]: the token in each slot that the LRU manages, -1 for none. Waits for the stream: for checks."""
        self._check_request(request)
        self._check_layer(layer)
        index = self._leaders.index(self.index_layers[layer])
        return self._arrays.to_numpy(self._tokens[index][request])[: self.hot_buffer_size]

    def slot_locs(self, request: int) -> np.ndarray:
        """int32 [H + 1]: the device loc of each slot, in all layers alike; slot H is for the newest token."""
        self._check_request(request)
        slots = self.hot_buffer_size + 1
        return np.arange(request * slots, (request + 1) * slots, dtype=np.int32)

    def record(self, path: str | Path, source: str = "") -> AbstractContextManager[Any]:
        """Writes the selections of all swap-ins inside a ``with`` block to a trace: see ``hisparse.trace``."""
        return recorder.recording(path, source)

    # Inside

    def _tables(self, index: int, top_k: Array) -> Tables:
        rows, width = len(top_k), self.top_k * self.item.block_tokens
        self._check_rows("top_k", rows)
        miss_src, miss_dst = self._plans[index]
        return Tables(
            top_k=top_k[:, : self.top_k],
            tokens=self._tokens[index],
            host_locs=self._host_locs,
            device_locs=self._device_locs,
            out=self._arrays.empty((rows, width), "int32"),
            req_pool_indices=self._rids[:rows],
            seq_lens=self._seq_lens[:rows],
            lru_slots=self._lru[index],
            num_real_reqs=self._num_real_reqs,
            miss_src=miss_src[:rows],
            miss_dst=miss_dst[:rows],
            miss_count=self._counters.miss_count[index][:rows],
            num_top_k=self.top_k,
            hot_buffer_size=self.hot_buffer_size,
            block_size=self._block_size,
        )

    def _new_plan(self) -> tuple[Array, Array]:
        shape = (self.max_batch, self.top_k * self.item.block_tokens)
        return self._arrays.full(shape, 0, "int64"), self._arrays.full(shape, 0, "int32")

    def _send(self) -> None:
        padding = self.max_batch - len(self._scheduled)
        rids = [*self._scheduled, *[self.max_requests] * padding]
        lengths = [*(self._lengths[request] for request in self._scheduled), *[1] * padding]
        self._arrays.upload(np.array([*rids, *lengths, len(self._scheduled)], np.int32), self._step)

    def _add_pages(self, requests: list[int], pages: np.ndarray) -> None:
        for request, page in zip(requests, pages, strict=True):
            self._pages.assign(request, page[None])
        starts = [self._lengths[request] for request in requests]
        rows = self._new_pages[: 3 * len(requests)]
        self._arrays.upload(np.array([*requests, *starts, *pages * self.page_size]), rows)
        rids, positions, locs = rows.reshape(3, -1, 1)
        places = self._arrays.arange(self.page_size)
        self._host_locs[rids, positions + places] = locs + places

    def _record(self, layer: int, top_k: Array) -> None:
        if self._arrays.is_capturing():
            raise RuntimeError("selections cannot be recorded while a graph is captured: record without graphs")
        recorder.add(
            layer,
            self._arrays.to_numpy(top_k[: len(self._scheduled), : self.top_k]),
            [self._lengths[request] for request in self._scheduled],
            [self._admission_of[request] for request in self._scheduled],
            self.item.block_tokens,
        )

    def _parts(self, items: Sequence[Array]) -> list[Array]:
        self._count(items)
        return [self._arrays.item_bytes(part, self.item.item_size_bytes) for part in items]

    def _count(self, items: Sequence[Array]) -> int:
        """Tokens in the tensors of one layer."""
        if len(items) != self.item.pool_count:
            raise TypeError(f"items: expected {self.item.pool_count} tensors for {self.item.name}, got {len(items)}")
        count, size = len(items[0]), self.item.item_size_bytes
        for part in items:
            if part.nbytes != count * size:
                raise ValueError(f"items: expected {size} bytes a token, got {tuple(part.shape)} of {part.dtype}")
        return count

    def _check_rows(self, name: str, rows: int) -> None:
        if rows > self.max_batch:
            raise ValueError(f"{name}: expected at most max_batch = {self.max_batch} rows, got {rows}")

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer: expected 0..{self.num_layers - 1}, got {layer}")

    def _check_request(self, request: int) -> None:
        if request not in self._lengths:
            raise ValueError(f"request: {request} is not admitted")

    def _check_context(self, length: int) -> None:
        if length > self.max_context:
            raise CapacityError("max_context", length, self.max_context)
