#pragma once

#include "item_layouts.h"

namespace hisparse::HISPARSE_TARGET {

// Byte `at` of an item. A loc outside the pool has an address too, which is computed and not used: so the sum
// is one of numbers, which may wrap.
template <class Layout, class Byte, class Loc>
__device__ __forceinline__ Byte* item_address(Byte* pool, Loc loc, int32_t at, int32_t item_bytes) {
  const uint64_t offset = Layout::offset(loc, at, static_cast<uint32_t>(item_bytes));
  return reinterpret_cast<Byte*>(reinterpret_cast<uintptr_t>(pool) + offset);
}

}  // namespace hisparse::HISPARSE_TARGET
