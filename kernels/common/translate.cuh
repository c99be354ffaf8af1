// Logical locations of tokens turned into physical ones; negative ones are padding and stay.
#pragma once

#include "index_vector.cuh"
#include "params.h"

namespace hisparse::HISPARSE_TARGET {

__device__ __forceinline__ void translate(const TranslateParams& p) {
  const int64_t threads = int64_t{grid_size()} * block_size();
  HISPARSE_NO_UNROLL
  for (int64_t i = int64_t{block_index()} * block_size() + thread_index(); i < p.count; i += threads) {
    int64_t location = load_index(p.locations, i * p.locations_stride);
    if (location >= 0) location = location < p.mapping_size ? load_index(p.mapping, location) : -1;
    if (p.output_is_int64) {
      static_cast<int64_t*>(p.output)[i] = location;
    } else {
      static_cast<int32_t*>(p.output)[i] = static_cast<int32_t>(location);
    }
  }
}

}  // namespace hisparse::HISPARSE_TARGET
