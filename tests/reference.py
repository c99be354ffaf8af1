"""What the ops must do, written out from their contract in plain Python and NumPy; nothing is taken from the kernels.

The functions have the signatures of the ops and work in place on NumPy arrays.
"""

from __future__ import annotations

import numpy as np


def pool_bytes(pool: np.ndarray) -> np.ndarray:
    """The bytes of a contiguous pool, [bytes], sharing its memory."""
    return np.ndarray(pool.nbytes, np.uint8, buffer=pool)


def item_rows(pool: np.ndarray, item_size_bytes: int) -> np.ndarray:
    """The whole items of a pool, uint8 [rows, item_size_bytes], sharing its memory."""
    rows = pool.nbytes // item_size_bytes
    return pool_bytes(pool)[: rows * item_size_bytes].reshape(rows, item_size_bytes)


def copy_items(src, dst, src_indices, dst_indices, item_size_bytes) -> None:
    source, destination = item_rows(src, item_size_bytes), item_rows(dst, item_size_bytes)
    for i, j in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
        if 0 <= i < len(source) and 0 <= j < len(destination):
            destination[j] = source[i]


def real_rows(batch: int, num_real_reqs) -> int:
    return batch if num_real_reqs is None else min(max(int(num_real_reqs[0]), 0), batch)


def load_cache_to_device_buffer_mla(
    top_k_tokens,
    device_buffer_tokens,
    host_cache_locs,
    device_buffer_locs,
    host_cache,
    device_buffer,
    top_k_device_locs,
    req_pool_indices,
    seq_lens,
    lru_slots,
    item_size_bytes,
    num_top_k,
    hot_buffer_size,
    page_size=1,
    block_size=256,
    num_real_reqs=None,
    miss_src=None,
    miss_dst=None,
    miss_count=None,
    skip_io=False,
    *,
    blocks_per_request=None,
) -> None:
    del page_size, block_size, blocks_per_request  # none of them changes the result
    host_items, device_items = item_rows(host_cache, item_size_bytes), item_rows(device_buffer, item_size_bytes)
    batch = len(top_k_tokens)
    real = real_rows(batch, num_real_reqs)

    for b in range(batch):
        output = top_k_device_locs[b, :num_top_k]
        if b >= real:
            output[:] = -1
            continue

        rid, seq_len = int(req_pool_indices[b]), int(seq_lens[b])
        entries = top_k_tokens[b, :num_top_k].tolist()
        locs = device_buffer_locs[rid, : hot_buffer_size + 1].tolist()

        if seq_len <= hot_buffer_size:
            output[:] = [locs[p] if 0 <= p < seq_len else -1 for p in entries]
            if miss_count is not None:
                miss_count[b] = 0
            continue

        newest = seq_len - 1
        wanted = {token for token in entries if 0 <= token < newest}
        slot_tokens = device_buffer_tokens[rid, :hot_buffer_size].tolist()
        hits = {token: slot for slot, token in enumerate(slot_tokens) if token in wanted}
        hit_slots = set(hits.values())

        old_order = lru_slots[rid, :hot_buffer_size].tolist()
        victims = iter([slot for slot in old_order if slot not in hit_slots])
        filled: dict[int, int] = {}
        for token in entries:
            if token in wanted and token not in hits and token not in filled:
                filled[token] = next(victims)

        slot_of = {**hits, **filled, newest: hot_buffer_size}
        output[:] = [locs[slot_of[token]] if token in slot_of else -1 for token in entries]

        filled_slots = set(filled.values())
        lru_slots[rid, :hot_buffer_size] = (
            [slot for slot in old_order if slot not in hit_slots and slot not in filled_slots]
            + list(filled.values())
            + [slot for slot in old_order if slot in hit_slots]
        )

        for i, (token, slot) in enumerate(filled.items()):
            device_buffer_tokens[rid, slot] = token
            source, destination = int(host_cache_locs[rid, token]), locs[slot]
            if not skip_io:
                device_items[destination] = host_items[source]
            if miss_count is not None:
                miss_src[b, i], miss_dst[b, i] = source, destination
        if miss_count is not None:
            miss_count[b] = len(filled)
