// The CUDA translation unit: primitives, shared kernels, entry points (named in kernels/common/params.h).
#include "primitives.cuh"
// Generic code follows the primitives.
#include "../common/content_check.cuh"
#include "../common/copy_chunk.cuh"
#include "../common/copy_items.cuh"
#include "../common/copy_tile.cuh"
#include "../common/swap_in.cuh"
#include "../common/transfer.cuh"

namespace hisparse {

extern "C" __global__ void __launch_bounds__(1024)
    hisparse_swap_in_4(const __grid_constant__ SwapInParams params) {
  HISPARSE_TARGET::swap_in<HISPARSE_TARGET::ChunkCopy, 4>(params);
}

extern "C" __global__ void __launch_bounds__(1024)
    hisparse_swap_in_8(const __grid_constant__ SwapInParams params) {
  HISPARSE_TARGET::swap_in<HISPARSE_TARGET::ChunkCopy, 8>(params);
}

extern "C" __global__ void __launch_bounds__(1024)
    hisparse_swap_in_any(const __grid_constant__ SwapInParams params) {
  HISPARSE_TARGET::swap_in<HISPARSE_TARGET::ChunkCopy, 0>(params);
}

extern "C" __global__ void __launch_bounds__(1024)
    hisparse_copy_items(const __grid_constant__ CopyItemsParams params) {
  HISPARSE_TARGET::copy_items<HISPARSE_TARGET::ChunkCopy>(params);
}

extern "C" __global__ void __launch_bounds__(1024)
    hisparse_check_swap_in(const __grid_constant__ SwapInCheckParams params) {
  HISPARSE_TARGET::check_swap_in(params);
}

extern "C" __global__ void __launch_bounds__(1024)
    hisparse_check_indices(const __grid_constant__ IndexCheckParams params) {
  HISPARSE_TARGET::check_indices(params);
}

extern "C" __global__ void __launch_bounds__(1024)
    hisparse_transfer(const __grid_constant__ TransferParams params) {
  HISPARSE_TARGET::transfer<HISPARSE_TARGET::TileCopy>(params);
}

}  // namespace hisparse
