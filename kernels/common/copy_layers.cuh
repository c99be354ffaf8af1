// The same tokens copied in every layer, between pools that lie anywhere.
#pragma once

#include "copy_share.cuh"
#include "params.h"

namespace hisparse::HISPARSE_TARGET {

struct LayerRows {
  const LayerCopyParams& p;

  __device__ __forceinline__ TileLocs find(uint32_t item) const {
    return {p.src_indices[item], p.dst_indices[item]};
  }
  __device__ __forceinline__ bool is_copied(const TileLocs& locs) const {
    return locs.src >= 0 && locs.dst >= 0;
  }
};

template <template <class> class Copy, class Layout>
__device__ __forceinline__ void copy_layers(const LayerCopyParams& p) {
  const WarpShare share;
  const auto lane = static_cast<uint32_t>(thread_index() % kWarpSize);
  const uint32_t count = share.count_of(p.count);
  const LayerRows rows{p};
  HISPARSE_NO_UNROLL
  for (int layer = block_part(); layer < p.layers; layer += p.layer_step) {
    TileLocs first{-1, -1};
    if (lane < count && lane < p.items_per_tile) first = rows.find(share.item(lane));
    copy_share<Copy, Layout>(share, count, reinterpret_cast<const unsigned char*>(p.src_ptrs[layer]),
                             reinterpret_cast<unsigned char*>(p.dst_ptrs[layer]),
                             reinterpret_cast<TileLocs*>(shared_memory()), p.items_per_tile, p.shape, first,
                             rows);
  }
}

}  // namespace hisparse::HISPARSE_TARGET
