// The CUDA translation unit: primitives, shared kernels, entry points (listed in kernels/common/params.h).
#include "primitives.cuh"
// Generic code follows the primitives.
#include "../common/content_check.cuh"
#include "../common/copy_chunk.cuh"
#include "../common/copy_items.cuh"
#include "../common/copy_layers.cuh"
#include "../common/copy_planned.cuh"
#include "../common/copy_tile.cuh"
#include "../common/swap_in.cuh"
#include "../common/transfer.cuh"
#include "../common/translate.cuh"

namespace hisparse {
namespace HISPARSE_TARGET {
template <class Items>
using ItemCopy = ChunkCopy<Items>;
template <class Items>
using PlainLoadsCopy = ChunkCopy<Items, PlainLoads>;
template <class Items>
using UngatedCopy = ChunkCopy<Items, Ungated>;
}  // namespace HISPARSE_TARGET

using namespace HISPARSE_TARGET;

#define HISPARSE_ENTRY_POINT(id, name, Params, ...)                                                \
  extern "C" __global__ void __launch_bounds__(1024) name(const __grid_constant__ Params params) { \
    __VA_ARGS__(params);                                                                           \
  }
HISPARSE_KERNELS(HISPARSE_ENTRY_POINT)

}  // namespace hisparse
