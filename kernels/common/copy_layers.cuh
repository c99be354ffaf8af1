// The same tokens copied in every layer, between pools that lie anywhere.
#pragma once

#include "copy_share.cuh"
#include "params.h"

namespace hisparse::HISPARSE_TARGET {

struct LayerRows {
  const LayerCopyParams& p;
  const WarpShare& share;

  __device__ __forceinline__ const TileLocs* tile(uint32_t done, uint32_t left) const {
    const auto lane = static_cast<uint32_t>(thread_index() % kWarpSize);
    TileLocs* const locs = locs_of_warp();
    if (lane < left) {
      const uint32_t item = share.item(done + lane);
      const TileLocs found{p.src_indices[item], p.dst_indices[item]};
      locs[lane] = found.src >= 0 && found.dst >= 0 ? found : TileLocs{-1, -1};
    }
    warp_barrier();
    return locs;
  }
};

template <template <class> class Copy, class Layout>
__device__ __forceinline__ void copy_layers(const LayerCopyParams& p) {
  const WarpShare share;
  const uint32_t count = share.count_of(p.count);
  const LayerRows rows{p, share};
  HISPARSE_NO_UNROLL
  for (int layer = block_part(); layer < p.layers; layer += p.layer_step) {
    copy_share<Copy, Layout>(count, reinterpret_cast<const unsigned char*>(p.src_ptrs[layer]),
                             reinterpret_cast<unsigned char*>(p.dst_ptrs[layer]), p.items_per_tile, p.shape,
                             rows);
  }
}

}  // namespace hisparse::HISPARSE_TARGET
