from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from .swap_in import Tensor

class BuildInfo(TypedDict):
    version: str
    targets: list[str]
    cuda_archs: list[str]
    rocm_archs: list[str]
    compiler: str

class Device(TypedDict):
    index: int
    name: str
    arch: str
    warp_size: int
    max_threads_per_block: int
    multiprocessors: int
    shared_memory_bytes: int

class Target(TypedDict):
    target: str
    devices: list[Device]
    library: str | None  # the driver's file; None for the CPU and where it is not available
    driver_version: str | None
    unavailable: str | None

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
    page_size: int,
    block_size: int,
    num_real_reqs: Tensor | None,
    miss_src: Tensor | None,
    miss_dst: Tensor | None,
    miss_count: Tensor | None,
    skip_io: bool,
    blocks_per_request: int | None,
    /,
) -> None: ...
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
    page_size: int,
    block_size: int,
    num_real_reqs: Tensor | None,
    miss_src: Tensor | None,
    miss_dst: Tensor | None,
    miss_count: Tensor | None,
    skip_io: bool,
    blocks_per_request: int | None,
    /,
) -> None: ...
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
    page_size: int,
    block_size: int,
    num_real_reqs: Tensor | None,
    skip_io: bool,
    blocks_per_request: int | None,
    /,
) -> None: ...
def copy_cache_planned_mla(
    miss_src: Tensor,
    miss_dst: Tensor,
    miss_count: Tensor,
    num_real_reqs: Tensor,
    host_cache: Tensor,
    device_buffer: Tensor,
    item_size_bytes: int,
    num_blocks: int,
    block_size: int,
    is_dsv4_layout: bool,
    skip_io: bool,
    /,
) -> None: ...
def transfer_cache_dsv4_mla(
    src_ptrs: Tensor, dst_ptrs: Tensor, src_indices: Tensor, dst_indices: Tensor, block_size: int, /
) -> None: ...
def translate_padded_hisparse_locations(
    mapping: Tensor, locations: Tensor, allocate: Callable[[Tensor, Any], Tensor], /
) -> Tensor: ...
def copy_items(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size_bytes: int, blocks: int | None, /
) -> None: ...
def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    block_quota: int,
    num_warps_per_block: int | None,
    /,
) -> None: ...
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
    block_quota: int,
    num_warps_per_block: int | None,
    /,
) -> None: ...
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
    block_quota: int,
    num_warps_per_block: int | None,
    /,
) -> None: ...
def transfer_kv_all_layer(
    src_k_layers: Tensor,
    dst_k_layers: Tensor,
    src_v_layers: Tensor,
    dst_v_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int,
    num_warps_per_block: int | None,
    /,
) -> None: ...
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
    block_quota: int,
    num_warps_per_block: int | None,
    /,
) -> None: ...
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
    block_quota: int,
    num_warps_per_block: int | None,
    /,
) -> None: ...
def transfer_kv_per_layer_mla(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    block_quota: int | None,
    num_warps_per_block: int | None,
    /,
) -> None: ...
def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    block_quota: int | None,
    num_warps_per_block: int | None,
    /,
) -> None: ...
def transfer_kv_all_layer_mla(
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int,
    num_warps_per_block: int | None,
    /,
) -> None: ...
def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    block_quota: int,
    num_warps_per_block: int | None,
    /,
) -> None: ...
def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
    /,
) -> None: ...
def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
    /,
) -> None: ...
def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor], dst_ptrs: Sequence[Tensor], src_indices: Tensor, dst_indices: Tensor, page_size: int, /
) -> None: ...
def transfer_embedding_ranges_direct(
    src: Tensor, dst: Tensor, src_starts: Sequence[int], dst_starts: Sequence[int], lengths: Sequence[int], /
) -> None: ...
def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor, /) -> None: ...
def get_device_accessible_ptr(tensor: Tensor, device_index: int, /) -> int: ...
def host_memory(memory: Tensor, /) -> tuple[int, int]: ...
def gpu_target() -> str | None: ...
def register_host_memory(target: str, address: int, bytes: int, device_index: int, /) -> None: ...
def unregister_host_memory(target: str, address: int, device_index: int, /) -> None: ...
def build_info() -> BuildInfo:
    """What this build of hisparse contains: its version, targets, archs per GPU target, and the host compiler."""

def targets() -> list[Target]:
    """Each target with the devices that this machine has for it, or why there are none."""

def add_content_checks(count: int, /) -> None: ...
def cpu_options() -> tuple[int, int | None, bool, str, int]: ...
def leave_out(part: int, /) -> None: ...
def set_cpu_options(values: tuple[int, int | None, bool, str, int] | None, /) -> None: ...
