"""Host and device memory for the items of all layers, by layout, and the ops that move items between them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

import hisparse
from hisparse import kvcacheio
from hisparse.arrays import Array, Arrays
from hisparse.presets import ItemFormat

_DSV4_PAGE_TOKENS, _DSV4_PAGE_BYTES = 64, 37440
_DSV4_VALUE_BYTES, _DSV4_SCALE_BYTES, _DSV4_SCALES_AT = 576, 8, 36864
# Nothing else runs on the GPU's side of the stream while the newest tokens go to the host.
_BACK_UP_BLOCKS = 16
_MOST_ROWS = 4096  # of a batch; longer pieces of prompts make their own


@dataclass(frozen=True)
class Tables:
    """The arguments of a swap-in that do not depend on the layout."""

    top_k: Array
    tokens: Array
    host_locs: Array
    device_locs: Array
    out: Array
    req_pool_indices: Array
    seq_lens: Array
    lru_slots: Array
    num_real_reqs: Array
    miss_src: Array
    miss_dst: Array
    miss_count: Array
    num_top_k: int
    hot_buffer_size: int
    block_size: int


class LatentPools:
    """One pool a side, uint8 [layers, tokens, item_size_bytes]."""

    records_misses = True

    def __init__(self, arrays: Arrays, item: ItemFormat, num_layers: int, host_tokens: int, device_tokens: int) -> None:
        self.arrays, self.item, self.num_layers = arrays, item, num_layers
        self.host = [self._pinned(self._shape(host_tokens)) for _ in range(item.pool_count)]
        self.device = [arrays.full(self._shape(device_tokens), 0, "uint8") for _ in range(item.pool_count)]
        self._rows = arrays.arange(_MOST_ROWS)
        self._host_layers = [self._layer_table(pool) for pool in self.host]
        self._device_layers = [self._layer_table(pool) for pool in self.device]

    def __del__(self) -> None:
        # The host pool goes back to the system with this object: by then nothing on the GPU may read it.
        if not sys.is_finalizing() and hasattr(self, "_device_layers"):
            self.arrays.finish()

    def _shape(self, tokens: int) -> tuple[int, ...]:
        return (self.num_layers, tokens, self.item.item_size_bytes)

    def _pinned(self, shape: tuple[int, ...]) -> Array:
        return self.arrays.pinned_bytes(int(np.prod(shape))).reshape(shape)

    def _layer_table(self, pool: Array) -> Array:
        base, step = self.arrays.accessible_ptr(pool), int(np.prod(pool.shape[1:]))
        return self.arrays.on_device(np.uint64(base) + np.arange(self.num_layers, dtype=np.uint64) * np.uint64(step))

    def write_host(self, layer: int, locs: Array, parts: list[Array]) -> None:
        """Items, uint8 [count, item_size_bytes] a pool and on the device, to locs int64 [count]."""
        self._write(self.host, layer, locs, parts)

    def write_device(self, layer: int, locs: Array, parts: list[Array]) -> None:
        self._write(self.device, layer, locs, parts)

    def _write(self, pools: list[Array], layer: int, locs: Array, parts: list[Array]) -> None:
        count = len(locs)
        rows = self._rows[:count] if count <= _MOST_ROWS else self.arrays.arange(count)
        for pool, items in zip(pools, parts, strict=True):
            hisparse.copy_items(items, pool[layer], rows, locs, self.item.item_size_bytes)

    def back_up(self, device_locs: Array, host_locs: Array) -> None:
        """Device to host, in all layers; int64 locs, pairs with a negative one are skipped."""
        kvcacheio.transfer_kv_all_layer_mla(
            self._device_layers[0],
            self._host_layers[0],
            device_locs,
            host_locs,
            self.item.item_size_bytes,
            self.num_layers,
            block_quota=_BACK_UP_BLOCKS,
        )

    def swap_in(self, layer: int, tables: Tables) -> None:
        self._load(hisparse.load_cache_to_device_buffer_mla, layer, tables)

    def _load(self, op: Any, layer: int, tables: Tables) -> None:
        op(
            *self._arguments(layer, tables),
            tables.num_top_k,
            tables.hot_buffer_size,
            block_size=tables.block_size,
            num_real_reqs=tables.num_real_reqs,
            miss_src=tables.miss_src,
            miss_dst=tables.miss_dst,
            miss_count=tables.miss_count,
        )

    def _arguments(self, layer: int, tables: Tables) -> list[Any]:
        """What all swap-ins start with, up to item_size_bytes."""
        pools = [pool[layer] for pool in (*self.host, *self.device)]
        before = [tables.top_k, tables.tokens, tables.host_locs, tables.device_locs]
        after = [tables.out, tables.req_pool_indices, tables.seq_lens, tables.lru_slots, self.item.item_size_bytes]
        return [*before, *pools, *after]

    def replay(self, layer: int, tables: Tables) -> None:
        """The copies of a swap-in of another layer, on this layer's pools."""
        hisparse.copy_cache_planned_mla(
            miss_src=tables.miss_src,
            miss_dst=tables.miss_dst,
            miss_count=tables.miss_count,
            num_real_reqs=tables.num_real_reqs,
            host_cache=self.host[0][layer],
            device_buffer=self.device[0][layer],
            item_size_bytes=self.item.item_size_bytes,
            is_dsv4_layout=self.item.layout == "dsv4",
        )

    def read_host(self, layer: int, locs: np.ndarray) -> list[Array]:
        """Copies of items; the caller has waited for the stream."""
        return [pool[layer][locs] for pool in self.host]

    def read_device(self, layer: int, locs: np.ndarray) -> list[Array]:
        return [pool[layer][self.arrays.on_device(locs)] for pool in self.device]


class KeyValuePools(LatentPools):
    """Two pools a side, of keys and of values; selections name blocks of tokens."""

    records_misses = False

    def back_up(self, device_locs: Array, host_locs: Array) -> None:
        kvcacheio.transfer_kv_all_layer(
            self._device_layers[0],
            self._host_layers[0],
            self._device_layers[1],
            self._host_layers[1],
            device_locs,
            host_locs,
            self.item.item_size_bytes,
            self.num_layers,
            block_quota=_BACK_UP_BLOCKS,
        )

    def swap_in(self, layer: int, tables: Tables) -> None:
        hisparse.load_blocks_to_device_buffer_mha(
            *self._arguments(layer, tables),
            tables.hot_buffer_size,
            self.item.block_tokens,
            block_size=tables.block_size,
            num_real_reqs=tables.num_real_reqs,
        )


class PagedPools(LatentPools):
    """DeepSeek-V4's pages a side, uint8 [layers, pages, 37440]: 64 values, then 64 scales, then padding."""

    def _shape(self, tokens: int) -> tuple[int, ...]:
        return (self.num_layers, -(-tokens // _DSV4_PAGE_TOKENS), _DSV4_PAGE_BYTES)

    @staticmethod
    def _values(pages: Array) -> Array:
        return pages[:, :_DSV4_SCALES_AT].reshape(len(pages), _DSV4_PAGE_TOKENS, _DSV4_VALUE_BYTES)

    @staticmethod
    def _scales(pages: Array) -> Array:
        end = _DSV4_SCALES_AT + _DSV4_PAGE_TOKENS * _DSV4_SCALE_BYTES
        return pages[:, _DSV4_SCALES_AT:end].reshape(len(pages), _DSV4_PAGE_TOKENS, _DSV4_SCALE_BYTES)

    def _put(self, pages: Array, locs: Array, items: Array) -> None:
        page, place = locs // _DSV4_PAGE_TOKENS, locs % _DSV4_PAGE_TOKENS
        self._values(pages)[page, place] = items[:, :_DSV4_VALUE_BYTES]
        self._scales(pages)[page, place] = items[:, _DSV4_VALUE_BYTES:]

    def _get(self, pages: Array, locs: Array) -> Array:
        page, place = locs // _DSV4_PAGE_TOKENS, locs % _DSV4_PAGE_TOKENS
        return self.arrays.concatenate([self._values(pages)[page, place], self._scales(pages)[page, place]])

    def write_device(self, layer: int, locs: Array, parts: list[Array]) -> None:
        self._put(self.device[0][layer], locs, parts[0])

    def write_host(self, layer: int, locs: Array, parts: list[Array]) -> None:
        """By way of pages on the device, so that the copy to the host keeps the stream's order."""
        count = len(locs)
        pages = self.arrays.full((-(-count // _DSV4_PAGE_TOKENS), _DSV4_PAGE_BYTES), 0, "uint8")
        rows = self.arrays.arange(count)
        self._put(pages, rows, parts[0])
        address = self.arrays.on_device(np.array([self.arrays.accessible_ptr(pages)], np.uint64))
        hisparse.transfer_cache_dsv4_mla(address, self._host_layers[0][layer : layer + 1], rows, locs)

    def back_up(self, device_locs: Array, host_locs: Array) -> None:
        hisparse.transfer_cache_dsv4_mla(self._device_layers[0], self._host_layers[0], device_locs, host_locs)

    def swap_in(self, layer: int, tables: Tables) -> None:
        self._load(hisparse.load_cache_to_device_buffer_dsv4_mla, layer, tables)

    def read_host(self, layer: int, locs: np.ndarray) -> list[Array]:
        return [self._get(self.host[0][layer], locs)]

    def read_device(self, layer: int, locs: np.ndarray) -> list[Array]:
        return [self._get(self.device[0][layer], self.arrays.on_device(locs))]


POOLS = {"latent": LatentPools, "key value": KeyValuePools, "dsv4": PagedPools}
