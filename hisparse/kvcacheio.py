"""Transfers of KV cache between host and device: the functions of ``sgl_kernel.kvcacheio``, by the same names.

A *pool* holds the keys, the values, or the latent items of all tokens; an *item* is what one token has in one layer,
``item_size`` bytes. With a pool as bytes, its items lie in one of four layouts:

| layout | as bytes | of |
|---|---|---|
| layer first | ``[token, item_size]``, one layer a pool | ``src_k``, ``dst`` of one layer |
| layer table | uint64 ``[num_layers]``: the address of each such pool | ``src_k_layers``, ``dst_layers`` |
| page first | ``[token, layout_dim]``; layer l: ``[:, l * item_size : (l + 1) * item_size]`` | ``_pf`` by a kernel |
| page head | ``[page, head, token in page, layer, item_size / heads]`` | ``_ph`` |

Transfers by a kernel (``transfer_kv_per_layer`` to ``transfer_kv_all_layer_mla_lf_pf``) move, for every i, the item of
token ``src_indices[i]`` to token ``dst_indices[i]``: ``dst_pool[dst_indices] = src_pool[src_indices]``, where a pool is
indexed by token whatever its layout. Their arguments:

- ``src_k``, ``src_v``, ``src``, ``dst_k``, ``dst_v``, ``dst``: pools, contiguous, of any dtype and shape; on the GPU,
  or in pinned or registered host memory, either side or both.
- ``src_k_layers``, ``src_v_layers``, ``src_layers``, ``dst_k_layers``, ``dst_v_layers``, ``dst_layers``: layer
  tables, on the GPU, of addresses as ``get_device_accessible_ptr`` gives them.
- ``src_indices``, ``dst_indices``: token numbers, contiguous int64 ``[N]``, on the GPU if a pool or table is.
- ``item_size``: bytes of one token in one layer, at least 1.
- ``layer_id``: the layer of a page-first or page-head source that is moved, from 0.
- ``num_layers``: layers of the tables, at least 1.
- ``src_layout_dim``, ``dst_layout_dim``: bytes of one token over all layers of the pool.
- ``page_size``: tokens of a page.
- ``head_num``: heads of an item; divides ``item_size`` and the layout dimension.
- ``block_quota``: the most thread blocks, so that a transfer in the background leaves the GPU to others. Where it may
  be None, that is the environment variable SGLANG_HICACHE_BLOCK_QUOTA, read at each call, or else 16 on ROCm and 2
  elsewhere.
- ``num_warps_per_block``: the most warps of a block; None is 32 on CUDA and 16 elsewhere.

What they have in common:

- A pair in which an index is negative, or past the end of its pool, is skipped. Where a destination stands twice, which
  item wins is unspecified, word by word. Source and destination rows do not overlap.
- The call enqueues one kernel on the current stream of the GPU, whatever device is current, and can be captured in a
  graph. On the CPU target the work is done when it returns.
- Item sizes that 16 divides are copied fastest where pools are aligned to 16 bytes too; any other size and alignment
  works.

Direct transfers leave the copying to the GPU's copy engines, in batches where the driver has them. They take their
indices from the CPU or the GPU, and check them before the first copy. Indices on the GPU make the call wait for the
stream, and cannot be captured.

All raise TypeError for wrong types and dtypes, ValueError for wrong shapes, strides, devices and values, IndexError
for a layer outside the pool, each naming the argument, and RuntimeError where the target was not built, has no driver
or device, or the driver reports an error. All but the last come before anything is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import _C
from .swap_in import Tensor


def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    block_quota: int = 2,
    num_warps_per_block: int | None = None,
) -> None:
    """Keys and values of one layer, layer first on both sides.

    Equals ``dst_k[dst_indices] = src_k[src_indices]``, with the pools as ``[tokens, item_size]`` bytes; values alike.
    """
    _C.transfer_kv_per_layer(
        src_k, dst_k, src_v, dst_v, src_indices, dst_indices, item_size, block_quota, num_warps_per_block
    )


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    block_quota: int = 2,
    num_warps_per_block: int | None = None,
) -> None:
    """Keys and values of layer ``layer_id``, from page first to layer first.

    Equals ``dst_k[dst_indices] = src_k[src_indices, layer_id * item_size : (layer_id + 1) * item_size]``, with pools as
    bytes, ``[tokens, src_layout_dim]`` and ``[tokens, item_size]``; values alike.

    Raises:
        IndexError: ``layer_id`` is no layer of the source.
    """
    _C.transfer_kv_per_layer_pf_lf(
        src_k,
        dst_k,
        src_v,
        dst_v,
        src_indices,
        dst_indices,
        layer_id,
        item_size,
        src_layout_dim,
        block_quota,
        num_warps_per_block,
    )


def transfer_kv_per_layer_ph_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    block_quota: int = 2,
    num_warps_per_block: int | None = None,
) -> None:
    """Keys and values of layer ``layer_id``, from page head to layer first.

    Equals, for each pair s, d of the indices,
    ``dst_k[d] = src_k[s // page_size, :, s % page_size, layer_id].flatten()``, with the pools as bytes,
    ``[pages, head_num, page_size, layers, item_size / head_num]`` and ``[tokens, item_size]``; values alike.

    Raises:
        IndexError: ``layer_id`` is no layer of the source.
    """
    _C.transfer_kv_per_layer_ph_lf(
        src_k,
        dst_k,
        src_v,
        dst_v,
        src_indices,
        dst_indices,
        layer_id,
        item_size,
        src_layout_dim,
        page_size,
        head_num,
        block_quota,
        num_warps_per_block,
    )


def transfer_kv_all_layer(
    src_k_layers: Tensor,
    dst_k_layers: Tensor,
    src_v_layers: Tensor,
    dst_v_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int | None = None,
) -> None:
    """Keys and values of all layers, between the pools that the layer tables name.

    Equals, for each layer l, ``dst_k_layers[l][dst_indices] = src_k_layers[l][src_indices]``, were the tables lists of
    pools; values alike. How many tokens those pools hold is not known here: indices past their end are the caller's
    fault.
    """
    _C.transfer_kv_all_layer(
        src_k_layers,
        dst_k_layers,
        src_v_layers,
        dst_v_layers,
        src_indices,
        dst_indices,
        item_size,
        num_layers,
        block_quota,
        num_warps_per_block,
    )


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int | None = None,
) -> None:
    """Keys and values of all layers, from the pools of layer tables to page first.

    Equals, for each layer l,
    ``dst_k[dst_indices, l * item_size : (l + 1) * item_size] = src_k_layers[l][src_indices]``, with ``dst_k`` as bytes,
    ``[tokens, dst_layout_dim]``; values alike.
    """
    _C.transfer_kv_all_layer_lf_pf(
        src_k_layers,
        dst_k,
        src_v_layers,
        dst_v,
        src_indices,
        dst_indices,
        item_size,
        dst_layout_dim,
        num_layers,
        block_quota,
        num_warps_per_block,
    )


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    block_quota: int = 2,
    num_warps_per_block: int | None = None,
) -> None:
    """Keys and values of all layers, from the pools of layer tables to page head.

    Equals, for each layer l and pair s, d of the indices,
    ``dst_k[d // page_size, :, d % page_size, l] = src_k_layers[l][s].view(head_num, -1)``, with ``dst_k`` as bytes,
    ``[pages, head_num, page_size, layers, item_size / head_num]``; values alike.
    """
    _C.transfer_kv_all_layer_lf_ph(
        src_k_layers,
        dst_k,
        src_v_layers,
        dst_v,
        src_indices,
        dst_indices,
        item_size,
        dst_layout_dim,
        num_layers,
        page_size,
        head_num,
        block_quota,
        num_warps_per_block,
    )


def transfer_kv_per_layer_mla(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    block_quota: int | None = None,
    num_warps_per_block: int | None = None,
) -> None:
    """Latent items of one layer, layer first on both sides: as ``transfer_kv_per_layer``, with one pool on each side.

    Equals ``dst[dst_indices] = src[src_indices]``, with the pools as ``[tokens, item_size]`` bytes.
    """
    _C.transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size, block_quota, num_warps_per_block)


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    block_quota: int | None = None,
    num_warps_per_block: int | None = None,
) -> None:
    """Latent items of layer ``layer_id``, from page first to layer first.

    Equals ``dst[dst_indices] = src[src_indices, layer_id * item_size : (layer_id + 1) * item_size]``, with the pools as
    bytes, ``[tokens, src_layout_dim]`` and ``[tokens, item_size]``.

    Raises:
        IndexError: ``layer_id`` is no layer of the source.
    """
    _C.transfer_kv_per_layer_mla_pf_lf(
        src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim, block_quota, num_warps_per_block
    )


def transfer_kv_all_layer_mla(
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int | None = None,
) -> None:
    """Latent items of all layers, between the pools that the layer tables name.

    Equals, for each layer l, ``dst_layers[l][dst_indices] = src_layers[l][src_indices]``, were the tables lists of
    pools.
    """
    _C.transfer_kv_all_layer_mla(
        src_layers, dst_layers, src_indices, dst_indices, item_size, num_layers, block_quota, num_warps_per_block
    )


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int | None = None,
) -> None:
    """Latent items of all layers, from the pools of a layer table to page first.

    Equals, for each layer l,
    ``dst[dst_indices, l * item_size : (l + 1) * item_size] = src_layers[l][src_indices]``, with ``dst`` as
    bytes, ``[tokens, dst_layout_dim]``.
    """
    _C.transfer_kv_all_layer_mla_lf_pf(
        src_layers,
        dst,
        src_indices,
        dst_indices,
        item_size,
        dst_layout_dim,
        num_layers,
        block_quota,
        num_warps_per_block,
    )


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Tokens between layers by the copy engine: ``dst[dst_indices] = src[src_indices]`` for every pair of tensors.

    Args:
        src_layers: A list or tuple of contiguous tensors ``[tokens, ...]``, such as all layers of keys and then all
            layers of values. Any dtype; on the GPU, or in pinned or registered host memory.
        dst_layers: As many. The tokens of a pair have the same number of bytes.
        src_indices: int64 [N], contiguous, on the CPU or the GPU, all within the tensors.
        dst_indices: int64 [N], the same.
        page_size: Tokens of a page; divides N. Runs of tokens that follow one another on both sides are one copy.

    Raises:
        ValueError: A list is empty, an index is outside its tensor, or ``page_size`` does not divide N.
        RuntimeError: Indices are on the GPU while a graph is captured.
    """
    _C.transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size)


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Pages of layers ``layer_id`` to ``layer_id + L - 1`` by the copy engine, from page-first pools to layers.

    Equals, per page n with ``s, d = src_indices[n * page_size], dst_indices[n * page_size]``, and per layer j:
    ``dst_ptrs[j][d : d + page_size] = src_ptrs[0][s // page_size, layer_id + j]``.

    Args:
        src_ptrs: ``[latent]`` or ``[keys, values]``, contiguous pools ``[pages, layers, page_size, ...]``.
        dst_ptrs: L tensors ``[tokens, ...]``, or L of keys and then L of values.
        src_indices: int64 [N], of whose pages the first index counts, a multiple of ``page_size``.
        dst_indices: int64 [N], of whose pages the first index counts.
        layer_id: The layer of the pools that goes to the first of ``dst_ptrs``.
        page_size: Divides N.
    """
    _C.transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """The way back of ``transfer_kv_per_layer_direct_pf_lf``: layer j of ``src_ptrs`` to layer j of the pools.

    Equals, per page n with ``s, d = src_indices[n * page_size], dst_indices[n * page_size]``, and per layer j:
    ``dst_ptrs[0][d // page_size, j] = src_ptrs[j][s : s + page_size]``.

    Args:
        src_ptrs: L tensors ``[tokens, ...]``, or L of keys and then L of values.
        dst_ptrs: ``[latent]`` or ``[keys, values]``, contiguous pools ``[pages, layers, page_size, ...]``.
        src_indices: int64 [N], of whose pages the first index counts.
        dst_indices: int64 [N], of whose pages the first index counts, a multiple of ``page_size``.
        page_size: Tokens of a page; divides N.
    """
    _C.transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size)


def transfer_embedding_ranges_direct(
    src: Tensor,
    dst: Tensor,
    src_starts: Sequence[int],
    dst_starts: Sequence[int],
    lengths: Sequence[int],
) -> None:
    """Ranges of rows by the copy engine: ``dst[d : d + n] = src[s : s + n]`` for every (s, d, n).

    Args:
        src: Contiguous [rows, columns]. One of the two tensors is on a GPU, or both are on the CPU.
        dst: Contiguous, with the dtype and number of columns of ``src``.
        src_starts: The first row of each range in ``src``, at least 0.
        dst_starts: The first row of each range in ``dst``.
        lengths: Rows of each range, at least 0.
    """
    _C.transfer_embedding_ranges_direct(src, dst, src_starts, dst_starts, lengths)


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Rows within every layer in CPU memory: ``layer[tgt_loc] = layer[src_loc].clone()``.

    Args:
        data_ptrs: uint64 [L], the address of each layer.
        strides: int64 [L], the bytes of a row of each layer.
        tgt_loc: int64 [N]. A pair with a negative loc on either side is skipped.
        src_loc: int64 [N].

    All four are on the CPU, contiguous. How many rows a layer has is not known here; one whose address 64 bits do not
    hold is a ValueError.
    """
    _C.copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc)


def get_device_accessible_ptr(tensor: Tensor, device_index: int) -> int:
    """The address that kernels on a GPU use for a tensor: for host memory on ROCm, another one than its own.

    Equals ``tensor.data_ptr()`` for a tensor on the GPU, and for pinned memory on CUDA.

    Args:
        tensor: Any dtype and shape. On that GPU, or contiguous in host memory that is pinned or registered.
        device_index: The number of the GPU. On a machine without one, the tensor's own address is the result.

    Raises:
        ValueError: The tensor is on another device, is not contiguous, or the GPU cannot reach it.
    """
    return _C.get_device_accessible_ptr(tensor, device_index)
