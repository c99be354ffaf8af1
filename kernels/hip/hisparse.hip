// The ROCm translation unit: primitives, shared kernels, entry points (named in kernels/common/params.h).
#include "primitives.h"
// Generic code follows the primitives.
#include "../common/content_check.cuh"
#include "../common/copy_items.cuh"
#include "../common/copy_wave.cuh"
#include "../common/swap_in.cuh"
#include "../common/transfer.cuh"

namespace hisparse {

extern "C" __global__ void __launch_bounds__(1024) hisparse_swap_in_4(const SwapInParams params) {
  HISPARSE_TARGET::swap_in<HISPARSE_TARGET::WaveCopy, 4>(params);
}

extern "C" __global__ void __launch_bounds__(1024) hisparse_swap_in_8(const SwapInParams params) {
  HISPARSE_TARGET::swap_in<HISPARSE_TARGET::WaveCopy, 8>(params);
}

extern "C" __global__ void __launch_bounds__(1024) hisparse_swap_in_any(const SwapInParams params) {
  HISPARSE_TARGET::swap_in<HISPARSE_TARGET::WaveCopy, 0>(params);
}

extern "C" __global__ void __launch_bounds__(1024) hisparse_copy_items(const CopyItemsParams params) {
  HISPARSE_TARGET::copy_items<HISPARSE_TARGET::WaveCopy>(params);
}

extern "C" __global__ void __launch_bounds__(1024) hisparse_check_swap_in(const SwapInCheckParams params) {
  HISPARSE_TARGET::check_swap_in(params);
}

extern "C" __global__ void __launch_bounds__(1024) hisparse_check_indices(const IndexCheckParams params) {
  HISPARSE_TARGET::check_indices(params);
}

extern "C" __global__ void __launch_bounds__(1024) hisparse_transfer(const TransferParams params) {
  HISPARSE_TARGET::transfer<HISPARSE_TARGET::WaveCopy>(params);
}

}  // namespace hisparse
