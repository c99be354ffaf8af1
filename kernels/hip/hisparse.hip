// The ROCm translation unit: primitives, shared kernels, entry points (listed in kernels/common/params.h).
#include "primitives.h"
// Generic code follows the primitives.
#include "../common/content_check.cuh"
#include "../common/copy_items.cuh"
#include "../common/copy_layers.cuh"
#include "../common/copy_planned.cuh"
#include "../common/copy_wave.cuh"
#include "../common/swap_in.cuh"
#include "../common/transfer.cuh"
#include "../common/translate.cuh"

namespace hisparse {
namespace HISPARSE_TARGET {
template <class Items>
using ItemCopy = WaveCopy<Items>;
template <class Items>
using PlainLoadsCopy = WaveCopy<Items, PlainLoads>;
template <class Items>
using UngatedCopy = WaveCopy<Items, Ungated>;
template <class Items>
using TileCopy = WaveCopy<Items>;
}  // namespace HISPARSE_TARGET

using namespace HISPARSE_TARGET;

#define HISPARSE_ENTRY_POINT(id, name, Params, ...) \
  extern "C" __global__ void __launch_bounds__(1024) name(const Params params) { __VA_ARGS__(params); }
HISPARSE_KERNELS(HISPARSE_ENTRY_POINT)

}  // namespace hisparse
