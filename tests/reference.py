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


def check_swap_in_invariants(before: dict, after: dict, sizes: dict, skip_io: bool = False) -> None:
    """What must hold after a call whatever the policy: no comparison with the reference above.

    `before` and `after` hold the arrays of the call by argument name. Before the call the bytes of resident tokens
    have to be in their slots, as they are after any earlier call.
    """
    item, num_top_k, hot = sizes["item_size_bytes"], sizes["num_top_k"], sizes["hot_buffer_size"]
    for name in ("top_k_tokens", "host_cache_locs", "device_buffer_locs", "host_cache", "req_pool_indices", "seq_lens"):
        assert np.array_equal(before[name], after[name]), f"{name} is an input and was changed"

    host_items, items_before = item_rows(before["host_cache"], item), item_rows(before["device_buffer"], item)
    items_after = item_rows(after["device_buffer"], item)
    batch = len(before["top_k_tokens"])
    real = real_rows(batch, before.get("num_real_reqs"))
    record = after.get("miss_count") is not None
    used_requests, written_rows = [], []

    for b in range(batch):
        output = after["top_k_device_locs"][b, :num_top_k]
        if b >= real:
            assert (output == -1).all(), f"row {b} is padding, its output is not all -1"
            for name in ("miss_src", "miss_dst", "miss_count"):
                assert not record or np.array_equal(before[name][b], after[name][b]), f"{name} of row {b} changed"
            continue

        rid, seq_len = int(before["req_pool_indices"][b]), int(before["seq_lens"][b])
        used_requests.append(rid)
        entries = before["top_k_tokens"][b, :num_top_k]
        valid = (entries >= 0) & (entries < seq_len)
        assert (output[~valid] == -1).all(), f"row {b}: an invalid entry has a loc"
        locs = before["device_buffer_locs"][rid, : hot + 1]
        assert np.isin(output[valid], locs).all(), f"row {b}: a loc that is no slot of the request"
        _, token_group = np.unique(entries[valid], return_inverse=True)
        _, loc_group = np.unique(output[valid], return_inverse=True)
        assert len(set(zip(token_group.tolist(), loc_group.tolist(), strict=True))) == len(set(token_group.tolist()))
        assert len(set(loc_group.tolist())) == len(set(token_group.tolist())), f"row {b}: two tokens share a loc"

        tokens_before = before["device_buffer_tokens"][rid, :hot]
        tokens_after = after["device_buffer_tokens"][rid, :hot]
        changed_slots = np.flatnonzero(tokens_before != tokens_after)
        order = after["lru_slots"][rid, :hot]
        assert np.array_equal(np.sort(order), np.arange(hot)), f"row {b}: lru_slots is no permutation"
        if seq_len > hot:
            held = tokens_after[(tokens_after >= 0) & (tokens_after < seq_len)]
            assert len(np.unique(held)) == len(held), f"row {b}: a token is in two slots"
        else:
            assert len(changed_slots) == 0 and np.array_equal(order, before["lru_slots"][rid, :hot])

        copied = np.isin(output, locs[changed_slots])
        if not skip_io:
            fetched = np.flatnonzero(valid & (entries < seq_len - 1))
            sources = before["host_cache_locs"][rid, entries[fetched]]
            wrong = (items_after[output[fetched]] != host_items[sources]).any(axis=1)
            assert not wrong.any(), f"row {b}: wrong bytes for entries {fetched[wrong]}"
            written_rows.extend(locs[changed_slots].tolist())
        assert not (copied & valid & (entries == seq_len - 1)).any(), f"row {b}: the newest token was copied"

        if record:
            count = int(after["miss_count"][b])
            assert count == len(changed_slots), f"row {b}: {count} misses recorded, {len(changed_slots)} slots filled"
            planned = after["miss_dst"][b, :count]
            assert np.array_equal(np.sort(planned), np.sort(locs[changed_slots])), f"row {b}: wrong plan"
            slot_of_loc = dict(zip(locs[:hot].tolist(), range(hot), strict=True))
            tokens = tokens_after[[slot_of_loc[loc] for loc in planned.tolist()]]
            sources = before["host_cache_locs"][rid, tokens]
            assert np.array_equal(after["miss_src"][b, :count], sources), f"row {b}: plan names the wrong host locs"

    untouched = np.ones(len(items_before), bool)
    untouched[written_rows] = False
    assert np.array_equal(items_before[untouched], items_after[untouched]), "device_buffer changed without a miss"
    for name in ("device_buffer_tokens", "lru_slots"):
        others = np.setdiff1d(np.arange(len(before[name])), used_requests)
        assert np.array_equal(before[name][others], after[name][others]), f"{name} of another request changed"
    assert np.array_equal(before["device_buffer_tokens"][:, hot:], after["device_buffer_tokens"][:, hot:])
