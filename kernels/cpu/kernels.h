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
#include "../common/copy_layers.cuh"
#include "../common/copy_planned.cuh"
#include "../common/copy_tile.cuh"
#include "../common/copy_wave.cuh"
#include "../common/swap_in.cuh"
#include "../common/transfer.cuh"
#include "../common/translate.cuh"

namespace hisparse::HISPARSE_TARGET {

template <template <class...> class Copy, template <class...> class Tile>
struct Kernels {
  template <class Items>
  using ItemCopy = Copy<Items>;
  template <class Items>
  using PlainLoadsCopy = Copy<Items, PlainLoads>;
  template <class Items>
  using UngatedCopy = Copy<Items, Ungated>;
  template <class Items>
  using TileCopy = Tile<Items>;

  static cpu::Kernel find(KernelId id) {
    switch (id) {
#define HISPARSE_ENTRY_POINT(id, name, Params, ...) \
  case KernelId::id:                                \
    return [](const void* params) { __VA_ARGS__(*static_cast<const Params*>(params)); };
      HISPARSE_KERNELS(HISPARSE_ENTRY_POINT)
#undef HISPARSE_ENTRY_POINT
      case KernelId::kCount:
        break;
    }
    return nullptr;
  }
};

cpu::Kernel kernel(KernelId id, bool chunk_copy) {
  return chunk_copy ? Kernels<ChunkCopy, TileCopy>::find(id) : Kernels<WaveCopy, WaveCopy>::find(id);
}

}  // namespace hisparse::HISPARSE_TARGET
