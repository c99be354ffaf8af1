"""What hisparse.kvcacheio must do, written out from its contract with NumPy's own indexing; nothing is taken from the
kernels, and no byte offset is computed here.

A pool is seen as its items: `items[token, layer]`, whatever the layout, and `tokens`, how many there are.
"""

from __future__ import annotations

import numpy as np
from reference import item_rows, pool_bytes


class LayerFirst:
    """One array per layer."""

    def __init__(self, layers: list[np.ndarray], item_size: int):
        self.layers = [item_rows(layer, item_size) for layer in layers]
        self.tokens = min(map(len, self.layers))

    def __getitem__(self, place: tuple[int, int]) -> np.ndarray:
        token, layer = place
        return self.layers[layer][token]

    def __setitem__(self, place: tuple[int, int], item: np.ndarray) -> None:
        token, layer = place
        self.layers[layer][token] = item


class PageFirst:
    def __init__(self, pool: np.ndarray, item_size: int, layout_dim: int):
        rows, layers = item_rows(pool, layout_dim), layout_dim // item_size
        self.tokens = len(rows)
        self.items = rows[:, : layers * item_size].reshape(self.tokens, layers, item_size)

    def __getitem__(self, place: tuple[int, int]) -> np.ndarray:
        return self.items[place]

    def __setitem__(self, place: tuple[int, int], item: np.ndarray) -> None:
        self.items[place] = item


class PageHead:
    def __init__(self, pool: np.ndarray, item_size: int, layout_dim: int, page_size: int, head_num: int):
        pages, layers = item_rows(pool, page_size * layout_dim), layout_dim // item_size
        head_dim = item_size // head_num
        by_head = pages.reshape(len(pages), head_num, page_size, layout_dim // head_num)
        self.items = by_head[..., : layers * head_dim].reshape(len(pages), head_num, page_size, layers, head_dim)
        self.page_size, self.tokens = page_size, len(pages) * page_size

    def __getitem__(self, place: tuple[int, int]) -> np.ndarray:
        token, layer = place
        return self.items[token // self.page_size, :, token % self.page_size, layer].reshape(-1)

    def __setitem__(self, place: tuple[int, int], item: np.ndarray) -> None:
        token, layer = place
        heads = self.items[token // self.page_size, :, token % self.page_size, layer]
        heads[...] = item.reshape(heads.shape)


def transfer(src, dst, src_indices, dst_indices, src_layers, dst_layers) -> None:
    """Items of the source's layers to the destination's, one pair of layers after the other."""
    for i, j in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
        if 0 <= i < src.tokens and 0 <= j < dst.tokens:
            for src_layer, dst_layer in zip(src_layers, dst_layers, strict=True):
                dst[j, dst_layer] = src[i, src_layer]


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size) -> None:
    assert len(src_indices) % page_size == 0
    for src, dst in zip(src_layers, dst_layers, strict=True):
        pool_bytes(dst).reshape(len(dst), -1)[dst_indices] = pool_bytes(src).reshape(len(src), -1)[src_indices]


def _page_pairs(src_indices, dst_indices, page_size):
    return zip(src_indices[::page_size].tolist(), dst_indices[::page_size].tolist(), strict=True)


def transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size) -> None:
    layers = len(dst_ptrs) // len(src_ptrs)
    for n, dst in enumerate(dst_ptrs):
        for s, d in _page_pairs(src_indices, dst_indices, page_size):
            dst[d : d + page_size] = src_ptrs[n // layers][s // page_size, layer_id + n % layers]


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size) -> None:
    layers = len(src_ptrs) // len(dst_ptrs)
    for n, src in enumerate(src_ptrs):
        for s, d in _page_pairs(src_indices, dst_indices, page_size):
            dst_ptrs[n // layers][d // page_size, n % layers] = src[s : s + page_size]


def transfer_embedding_ranges_direct(src, dst, src_starts, dst_starts, lengths) -> None:
    for s, d, n in zip(src_starts, dst_starts, lengths, strict=True):
        dst[d : d + n] = src[s : s + n]
