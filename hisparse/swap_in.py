"""The hot-buffer swap-in ops, and the item copy that they are built on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, Union

from . import _C

if TYPE_CHECKING:
    import numpy
    import torch

Tensor: TypeAlias = Union["torch.Tensor", "numpy.ndarray[Any, Any]"]


def load_cache_to_device_buffer_mla(
    top_k_tokens: Tensor,
    device_buffer_tokens: Tensor,
    host_cache_locs: Tensor,
    device_buffer_locs: Tensor,
    host_cache: Tensor,
    device_buffer: Tensor,
    top_k_device_locs: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    lru_slots: Tensor,
    item_size_bytes: int,
    num_top_k: int,
    hot_buffer_size: int,
    page_size: int = 1,
    block_size: int = 256,
    num_real_reqs: Tensor | None = None,
    miss_src: Tensor | None = None,
    miss_dst: Tensor | None = None,
    miss_count: Tensor | None = None,
    skip_io: bool = False,
    *,
    blocks_per_request: int | None = None,
) -> None:
    """Turns the token positions that attention will read into device slots, and fetches those that are missing.

    B is the number of rows of the batch, K ``num_top_k``, H ``hot_buffer_size``, and R the number of request rows of
    a table, which may differ from table to table. ``rid`` is a row's ``req_pool_indices`` entry; a *loc* is the number
    of an item in a pool, whose item ``loc`` is the bytes ``loc * item_size_bytes`` to
    ``(loc + 1) * item_size_bytes - 1``.

    All tensors but ``host_cache`` are on one device, as torch tensors or NumPy arrays: on the CPU, the CPU target does
    the work before the call returns; on a GPU, the call enqueues one kernel on the current stream of that device,
    whatever device is current. It can be captured in a CUDA graph: it neither allocates nor synchronises, and reads
    every value of a tensor on the device. Gradients do not flow through the op.

    Args:
        top_k_tokens: int32 [B, >= K], read. Token positions; -1 is an unused entry. The first K columns count.
        device_buffer_tokens: int32 [R, >= H + page_size], updated. The token that each slot holds, -1 for none. Slot
            H belongs to the newest token.
        host_cache_locs: int64 [R, max_tokens], read. The loc in ``host_cache`` of each token position.
        device_buffer_locs: int32 [R, >= H + page_size], read. The loc in ``device_buffer`` of each slot. Its row
            stride is that of ``device_buffer_tokens``.
        host_cache: Any dtype and shape, contiguous, read. The pool that holds every token. For a GPU: pinned or
            registered host memory, or memory of the same device.
        device_buffer: Any dtype and shape, contiguous, written. The pool that attention reads.
        top_k_device_locs: int32 [B, >= K], written. The loc in ``device_buffer`` of each entry of ``top_k_tokens``, -1
            where it has none. The first K columns are all defined; further ones keep their values. Shares no element
            with another argument.
        req_pool_indices: int32 or int64 [B], read. The row of each request in the tables.
        seq_lens: int32 or int64 [B], read. Lengths in tokens, the newest one included.
        lru_slots: int16 [R, >= H], updated. A permutation of the slots 0 .. H - 1, least recently used first.
        item_size_bytes: Bytes of one token in one layer.
        num_top_k: K, at most 32766.
        hot_buffer_size: H, from K to 32768. How far it goes on a GPU is a question of its shared memory.
        page_size: Slots of a row behind the first H.
        block_size: The least number of threads per block: a multiple of the device's warp size, at most 1024.
        num_real_reqs: int32 [>= 1], read, or None for B. Rows from its first entry on are padding.
        miss_src: int64 [B, >= K], written, or None. The loc in ``host_cache`` of each copied item.
        miss_dst: int32 [B, >= K], written, with the row stride of ``miss_src``. Its loc in ``device_buffer``.
        miss_count: int32 [B], written. Items copied per row; entries of the two others from there on are unspecified.
            The three are given together or not at all.
        skip_io: Plan and update the tables as usual, but copy no item.
        blocks_per_request: Blocks that share the copying of one row, 1 to 64; None leaves the choice to the library.
            It has no influence on the result.

    The tables' row strides are free; their last dimension is contiguous. Per row b, the call equals:

        def swap_in(b):
            top_k, output = top_k_tokens[b, :K], top_k_device_locs[b, :K]
            output[:] = -1
            if num_real_reqs is not None and b >= num_real_reqs[0]:
                return  # padding: no plan, no count
            rid, length = req_pool_indices[b], seq_lens[b]
            tokens, locs, lru = device_buffer_tokens[rid], device_buffer_locs[rid], lru_slots[rid, :H].clone()
            if length <= H:  # token p is in slot p
                valid = (top_k >= 0) & (top_k < length)
                output[valid] = locs[top_k[valid].long()]
                misses = []
            else:
                wanted = [int(t) for t in top_k if 0 <= t < length - 1]
                hits = {s for s in range(H) if tokens[s] in wanted}
                misses = [t for t in dict.fromkeys(wanted) if t not in tokens[:H]]
                free = [int(s) for s in lru if int(s) not in hits]
                for slot, token in zip(free, misses):
                    tokens[slot] = token
                    source, target = host_cache_locs[rid, token], locs[slot]
                    device_items[target] = host_items[source]  # the pools as bytes, [-1, item_size_bytes]
                filled, used = free[: len(misses)], [int(s) for s in lru if int(s) in hits]
                lru_slots[rid, :H] = torch.tensor(free[len(misses) :] + filled + used)
                for i, token in enumerate(top_k):
                    if token == length - 1:
                        output[i] = locs[H]
                    elif 0 <= token < length - 1:
                        output[i] = locs[tokens[:H].tolist().index(token)]
            # a plan gets the (source, target) pairs in the order of the misses, and their number

    Rows of one call name different requests, a token is in at most one slot, ``lru_slots`` rows are permutations, and
    the locs of tokens that are asked for are rows of their pools. Where that does not hold the result is unspecified,
    but nothing outside the pools is read or written.

    Raises:
        TypeError: An argument is no tensor, has the wrong dtype, or is no int.
        ValueError: An argument has the wrong shape, strides, device or value; K and H need more shared memory than
            the device has; the device cannot reach ``host_cache``.
        RuntimeError: The target was not built, has no driver or device, or the driver reports an error. That error
            apart, all come before anything is launched or changed.
    """
    _C.load_cache_to_device_buffer_mla(
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
        page_size,
        block_size,
        num_real_reqs,
        miss_src,
        miss_dst,
        miss_count,
        skip_io,
        blocks_per_request,
    )


def load_cache_to_device_buffer_dsv4_mla(
    top_k_tokens: Tensor,
    device_buffer_tokens: Tensor,
    host_cache_locs: Tensor,
    device_buffer_locs: Tensor,
    host_cache: Tensor,
    device_buffer: Tensor,
    top_k_device_locs: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    lru_slots: Tensor,
    item_size_bytes: int,
    num_top_k: int,
    hot_buffer_size: int,
    page_size: int = 1,
    block_size: int = 256,
    num_real_reqs: Tensor | None = None,
    miss_src: Tensor | None = None,
    miss_dst: Tensor | None = None,
    miss_count: Tensor | None = None,
    skip_io: bool = False,
    *,
    blocks_per_request: int | None = None,
) -> None:
    """``load_cache_to_device_buffer_mla`` for the C4 cache of DeepSeek-V4, whose pools consist of pages.

    A page is 37,440 bytes for 64 tokens: 64 values of 576 bytes, 64 scales of 8 bytes, and padding, which is neither
    read nor written. The token of loc ``l`` has its value at byte ``l // 64 * 37440 + l % 64 * 576`` of a pool, and its
    scale at byte ``l // 64 * 37440 + 36864 + l % 64 * 8``. Copying an item means copying both.

    All else is as there:

    Args:
        top_k_tokens: int32 [B, >= K], read. Token positions; -1 is an unused entry.
        device_buffer_tokens: int32 [R, >= H + page_size], updated. The token of each slot.
        host_cache_locs: int64 [R, max_tokens], read. The loc in host memory of each token.
        device_buffer_locs: int32 [R, >= H + page_size], read. The loc on the device of each slot.
        host_cache: Pages of any dtype and shape, contiguous, aligned to 8 bytes, read. A part of a page at the end
            holds no token.
        device_buffer: Pages, as these, written.
        top_k_device_locs: int32 [B, >= K], written. The loc of each entry, or -1.
        req_pool_indices: int32 or int64 [B], read. The row of each request in the tables.
        seq_lens: int32 or int64 [B], read. Lengths in tokens, the newest one included.
        lru_slots: int16 [R, >= H], updated. Slots, least recently used first.
        item_size_bytes: 584.
        num_top_k: K.
        hot_buffer_size: H.
        page_size: Slots of a row behind the first H.
        block_size: The least number of threads per block.
        num_real_reqs: int32 [>= 1], read, or None. Rows from its first entry on are padding.
        miss_src: int64 [B, >= K], written, or None. The loc in host memory of each copied item.
        miss_dst: int32 [B, >= K], written, or None. Its loc on the device.
        miss_count: int32 [B], written, or None. Items copied per row.
        skip_io: Plan and update the tables as usual, but copy no item.
        blocks_per_request: Blocks that share the copying of one row, 1 to 64, or None.

    It equals that call, but with both pools as pages, uint8 [pages, 37440], an item is copied by:

        def value_and_scale(pages, loc):
            page, place = pages[loc // 64], loc % 64
            return page[place * 576 :][:576], page[36864 + place * 8 :][:8]

        for target, source in zip(value_and_scale(device_pages, target_loc), value_and_scale(host_pages, source_loc)):
            target.copy_(source)

    Raises:
        TypeError: As there.
        ValueError: As there, and for another item size or a pool that is not aligned.
        RuntimeError: As there.
    """
    _C.load_cache_to_device_buffer_dsv4_mla(
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
        page_size,
        block_size,
        num_real_reqs,
        miss_src,
        miss_dst,
        miss_count,
        skip_io,
        blocks_per_request,
    )


def load_blocks_to_device_buffer_mha(
    top_k_blocks: Tensor,
    device_buffer_tokens: Tensor,
    host_cache_locs: Tensor,
    device_buffer_locs: Tensor,
    host_cache_k: Tensor,
    host_cache_v: Tensor,
    device_buffer_k: Tensor,
    device_buffer_v: Tensor,
    top_k_device_locs: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    lru_slots: Tensor,
    item_size_bytes: int,
    hot_buffer_size: int,
    sparse_block_size: int,
    page_size: int = 1,
    block_size: int = 256,
    num_real_reqs: Tensor | None = None,
    skip_io: bool = False,
    *,
    blocks_per_request: int | None = None,
) -> None:
    """The swap-in where the indexer picks blocks of tokens, and a token has a key and a value.

    Kb is the number of blocks per row and S ``sparse_block_size``: block j stands for the tokens ``j * S`` to
    ``(j + 1) * S - 1``, and a row has K = Kb * S entries, those of its first block first. Slots are still those of
    single tokens, and so are hits, misses and the LRU order. A loc is a row of the key pool and of the value pool.

    Args:
        top_k_blocks: int32 [B, Kb], read, row stride free. Blocks; -1 is unused.
        device_buffer_tokens: int32 [R, >= H + page_size], updated. The token of each slot.
        host_cache_locs: int64 [R, max_tokens], read. The loc in host memory of each token.
        device_buffer_locs: int32 [R, >= H + page_size], read. The loc on the device of each slot.
        host_cache_k: Any dtype, contiguous, [rows, ...] with ``item_size_bytes`` bytes per row, read. For a GPU: pinned
            or registered host memory, or memory of the same device.
        host_cache_v: As ``host_cache_k``.
        device_buffer_k: Any dtype, contiguous, [rows, ...] with ``item_size_bytes`` bytes per row, written.
        device_buffer_v: As ``device_buffer_k``.
        top_k_device_locs: int32 [B, >= K], written. The loc of each entry; -1 where its block is unused and for tokens
            at or past the length.
        req_pool_indices: int32 or int64 [B], read. The row of each request in the tables.
        seq_lens: int32 or int64 [B], read. Lengths in tokens, the newest one included.
        lru_slots: int16 [R, >= H], updated. Slots, least recently used first.
        item_size_bytes: Bytes of the key of one token in one layer, and of its value.
        hot_buffer_size: H, from K to 32768. K is at most 32766.
        sparse_block_size: S, at least 1.
        page_size: Slots of a row behind the first H.
        block_size: The least number of threads per block.
        num_real_reqs: int32 [>= 1], read, or None. Rows from its first entry on are padding.
        skip_io: Plan and update the tables as usual, but copy no item.
        blocks_per_request: Blocks that share the copying of one row, 1 to 64, or None.

    It equals ``load_cache_to_device_buffer_mla``, once with the pools of keys and once with those of values, with:

        tokens = top_k_blocks[:, :, None] * S + torch.arange(S)
        top_k_tokens = torch.where(top_k_blocks[:, :, None] < 0, -1, tokens).flatten(1)

    except that tables and LRU order change once.

    Raises:
        TypeError: As there.
        ValueError: As there, and where H is below Kb * S or a pool's rows have another size.
        RuntimeError: As there.
    """
    _C.load_blocks_to_device_buffer_mha(
        top_k_blocks,
        device_buffer_tokens,
        host_cache_locs,
        device_buffer_locs,
        host_cache_k,
        host_cache_v,
        device_buffer_k,
        device_buffer_v,
        top_k_device_locs,
        req_pool_indices,
        seq_lens,
        lru_slots,
        item_size_bytes,
        hot_buffer_size,
        sparse_block_size,
        page_size,
        block_size,
        num_real_reqs,
        skip_io,
        blocks_per_request,
    )


def copy_items(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size_bytes: int,
    *,
    blocks: int | None = None,
) -> None:
    """Copies items between two pools, byte for byte, whatever their size and alignment.

    With the pools as bytes, [-1, item_size_bytes], it equals
    ``dst_items[dst_indices[keep]] = src_items[src_indices[keep]]``, where ``keep`` selects the pairs in which neither
    index is negative. Where a destination stands twice, which item wins is unspecified. Pairs with an index past the
    end of a pool are skipped as well.

    Args:
        src: Any dtype and shape, contiguous, read. A GPU reads its own memory and pinned or registered host memory.
        dst: Any dtype and shape, contiguous, written. As ``src``.
        src_indices: int64 [N], contiguous, on the GPU if a pool is.
        dst_indices: int64 [N], contiguous, on the device of ``src_indices``.
        item_size_bytes: Bytes of one item, at least 1.
        blocks: Blocks of 256 threads that share the copying, at least 1; None leaves the choice to the library.

    Runs as ``load_cache_to_device_buffer_mla`` does: on the current stream of the GPU, or at once on the CPU.

    Raises:
        TypeError: An argument is no tensor, has the wrong dtype, or is no int.
        ValueError: An argument has the wrong shape, strides, device or value, or the device cannot reach a pool.
        RuntimeError: The target was not built, has no driver or device, or the driver reports an error.
    """
    _C.copy_items(src, dst, src_indices, dst_indices, item_size_bytes, blocks)
