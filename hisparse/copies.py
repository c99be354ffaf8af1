"""What goes with the swap-in: its miss plan replayed, DeepSeek-V4 tokens transferred, locations translated."""

from __future__ import annotations

from typing import Any

from . import _C
from .swap_in import Tensor


def copy_cache_planned_mla(
    *,
    miss_src: Tensor,
    miss_dst: Tensor,
    miss_count: Tensor,
    num_real_reqs: Tensor,
    host_cache: Tensor,
    device_buffer: Tensor,
    item_size_bytes: int,
    num_blocks: int = 4,
    block_size: int = 1024,
    is_dsv4_layout: bool = False,
    skip_io: bool = False,
) -> None:
    """Copies for another layer what a swap-in copied: replays its miss plan on that layer's pools.

    Layers that share an index share hits and misses, so one swap-in with a plan serves them all. The copy takes a grid
    of ``num_blocks`` blocks, however much there is to copy, and the items of all rows are split evenly among its
    warps. So it can run on a side stream and leave most of the GPU to what runs beside it.

    Args:
        miss_src: int64 [B, >= K], read, row stride free. The plan of ``load_cache_to_device_buffer_mla`` or
            ``load_cache_to_device_buffer_dsv4_mla``: the loc in ``host_cache`` of each item.
        miss_dst: int32 [B, >= K], read, with the row stride of ``miss_src``. Its loc in ``device_buffer``.
        miss_count: int32 [B], read. Items per row; what exceeds the width of the plan counts as that width.
        num_real_reqs: int32 [>= 1], read. Rows from its first entry on are ignored, whatever they say.
        host_cache: Any dtype and shape, contiguous, read. For a GPU: pinned or registered host memory, or memory of the
            same device.
        device_buffer: Any dtype and shape, contiguous, written.
        item_size_bytes: Bytes of one token in one layer.
        num_blocks: Blocks of the grid, 1 to 65535.
        block_size: Threads per block: a multiple of the device's warp size, at most 1024. No more than 16 warps of them
            are used, which is 512 threads on NVIDIA GPUs: that was faster there.
        is_dsv4_layout: The pools are pages as in ``load_cache_to_device_buffer_dsv4_mla``, and the same checks hold.
        skip_io: Copy nothing.

    With the pools as bytes, [-1, item_size_bytes], it equals:

        for b in range(min(num_real_reqs[0], len(miss_count))):
            n = miss_count[b]
            device_items[miss_dst[b, :n]] = host_items[miss_src[b, :n]]

    Locs outside the pools are skipped. Runs as ``load_cache_to_device_buffer_mla`` does: on the current stream of
    ``device_buffer``'s GPU, capturable in a graph, or at once on the CPU.

    Raises:
        TypeError: An argument is no tensor, has the wrong dtype, or is no int.
        ValueError: An argument has the wrong shape, strides, device or value, or the device cannot reach
            ``host_cache``.
        RuntimeError: The target was not built, has no driver or device, or the driver reports an error.
    """
    _C.copy_cache_planned_mla(
        miss_src,
        miss_dst,
        miss_count,
        num_real_reqs,
        host_cache,
        device_buffer,
        item_size_bytes,
        num_blocks,
        block_size,
        is_dsv4_layout,
        skip_io,
    )


def transfer_cache_dsv4_mla(
    src_ptrs: Tensor, dst_ptrs: Tensor, src_indices: Tensor, dst_indices: Tensor, block_size: int = 1024
) -> None:
    """Copies tokens between DeepSeek-V4 pools, in every layer; value and scale, as in
    ``load_cache_to_device_buffer_dsv4_mla``.

    Args:
        src_ptrs: uint64 [L], contiguous, read. The address of each layer's pool, as kernels on the device reach it
            (``hisparse.kvcacheio.get_device_accessible_ptr``), aligned to 8 bytes.
        dst_ptrs: uint64 [L], contiguous, on the device of ``src_ptrs``, read. The same of the pools to write.
        src_indices: int64 [N], contiguous, on the device of ``src_ptrs``, read. Locs in each source pool.
        dst_indices: int64 [N], as these. Locs in each target pool.
        block_size: Threads per block: a multiple of the device's warp size, at most 1024.

    With the layers' pools as pages and ``value_and_scale`` from there, it equals:

        for source_pages, target_pages in zip(sources, targets):
            for source, target in zip(src_indices, dst_indices):
                if source >= 0 and target >= 0:
                    for to, of in zip(value_and_scale(target_pages, target), value_and_scale(source_pages, source)):
                        to.copy_(of)

    Where a target stands twice, which token wins is unspecified. That indices lie within their pools is the caller's
    to see to, as are the addresses. Runs as ``load_cache_to_device_buffer_mla`` does, on the GPU of ``src_ptrs``.

    Raises:
        TypeError: An argument is no tensor, has the wrong dtype, or is no int.
        ValueError: An argument has the wrong shape, strides, device or value.
        RuntimeError: The target was not built, has no driver or device, or the driver reports an error.
    """
    _C.transfer_cache_dsv4_mla(src_ptrs, dst_ptrs, src_indices, dst_indices, block_size)


def translate_padded_hisparse_locations(mapping: Tensor, locations: Tensor) -> Tensor:
    """Looks locations up in a mapping; negative ones are padding and stay as they are.

    Args:
        mapping: int32 or int64 [entries], contiguous, read.
        locations: int32 or int64 [N], of any stride, on the device of ``mapping``, read.

    Returns:
        A new contiguous tensor or array [N] on the same device, of the dtype that both promote to. It equals
        ``torch.where(locations < 0, locations, mapping[locations.clamp(min=0)])``. Locations past the end of the
        mapping give -1.

    It runs on the current stream of the GPU, capturable in a graph, or at once on the CPU.

    Raises:
        TypeError: An argument is no tensor or has the wrong dtype.
        ValueError: An argument has the wrong shape, strides or device.
        RuntimeError: The target was not built, has no driver or device, or the driver reports an error.
    """
    return _C.translate_padded_hisparse_locations(mapping, locations, _new_like)


def _new_like(tensor: Tensor, dtype: Any) -> Tensor:
    if hasattr(tensor, "new_empty"):
        return tensor.new_empty(tensor.shape, dtype=dtype)
    import numpy

    return numpy.empty(tensor.shape, dtype)
