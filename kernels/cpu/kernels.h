// The shared kernels compiled for the CPU target at one warp width; included by kernels_wave32.cpp and
// kernels_wave64.cpp.
#pragma once

// Predicated loads leave registers alone that the store with the same predicate then does not read; gcc does
// not see it.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "primitives.h"
// Generic code follows the primitives.
#include "../common/content_check.cuh"
#include "../common/copy_chunk.cuh"
#include "../common/copy_items.cuh"
#include "../common/copy_tile.cuh"
#include "../common/copy_wave.cuh"
#include "../common/swap_in.cuh"
#include "../common/transfer.cuh"

namespace hisparse::HISPARSE_TARGET {

template <template <class> class Copy, template <class> class Tile>
cpu::Kernel kernel_with(KernelId id) {
  switch (id) {
    case KernelId::kSwapIn4:
      return [](const void* params) { swap_in<Copy, 4>(*static_cast<const SwapInParams*>(params)); };
    case KernelId::kSwapIn8:
      return [](const void* params) { swap_in<Copy, 8>(*static_cast<const SwapInParams*>(params)); };
    case KernelId::kSwapInAny:
      return [](const void* params) { swap_in<Copy, 0>(*static_cast<const SwapInParams*>(params)); };
    case KernelId::kCopyItems:
      return [](const void* params) { copy_items<Copy>(*static_cast<const CopyItemsParams*>(params)); };
    case KernelId::kTransfer:
      return [](const void* params) { transfer<Tile>(*static_cast<const TransferParams*>(params)); };
    case KernelId::kCheckSwapIn:
      return [](const void* params) { check_swap_in(*static_cast<const SwapInCheckParams*>(params)); };
    case KernelId::kCheckIndices:
      return [](const void* params) { check_indices(*static_cast<const IndexCheckParams*>(params)); };
    case KernelId::kCount:
      break;
  }
  return nullptr;
}

cpu::Kernel kernel(KernelId id, bool chunk_copy) {
  return chunk_copy ? kernel_with<ChunkCopy, TileCopy>(id) : kernel_with<WaveCopy, WaveCopy>(id);
}

}  // namespace hisparse::HISPARSE_TARGET
