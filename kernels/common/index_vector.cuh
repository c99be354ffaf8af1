#pragma once

#include "params.h"

namespace hisparse::HISPARSE_TARGET {

// Both widths take the same path: the low half is there in either, the high half is the sign or is loaded.
template <class Index>
__device__ __forceinline__ int64_t load_index(const IndexVector& vector, Index at) {
  const int32_t* const low_half = static_cast<const int32_t*>(vector.data) + at * (vector.is_int64 ? 2 : 1);
  const int32_t low = low_half[0];
  const int32_t high = vector.is_int64 ? low_half[1] : low >> 31;
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 |
                              static_cast<uint32_t>(low));
}

}  // namespace hisparse::HISPARSE_TARGET
