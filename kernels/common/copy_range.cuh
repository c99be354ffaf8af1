// A run of items that one warp copies, a tile of at most one per lane at a time: each lane finds an item,
// then all copy all of them. So an item is looked up once, and not for each of its words.
#pragma once

#include "item_address.cuh"
#include "params.h"

namespace hisparse::HISPARSE_TARGET {

template <class Layout>
struct TileItems {
  using Index = int32_t;
  static constexpr int32_t kTailAt = Layout::kTailAt;

  const unsigned char* src_pool;
  unsigned char* dst_pool;
  const TileLocs* locs;  // of the tile, in shared memory; negative where there is nothing to copy
  int32_t item_bytes;

  __device__ __forceinline__ bool locate(Index item, int32_t at, const unsigned char*& from,
                                         unsigned char*& to) const {
    const TileLocs found = locs[item];
    from = item_address<Layout>(src_pool, found.src, at, item_bytes);
    to = item_address<Layout>(dst_pool, found.dst, at, item_bytes);
    return found.src >= 0;
  }
};

// find(item) is where an item comes from and goes to. The block's shared memory from `tiles` on holds an
// entry per thread.
template <template <class> class Copy, class Layout, class Find>
__device__ __forceinline__ void copy_range(uint32_t first, uint32_t end, const unsigned char* src_pool,
                                           unsigned char* dst_pool, TileLocs* tiles, uint32_t items_per_tile,
                                           const TileShape& shape, Find find) {
  const int lane = thread_index() % kWarpSize;
  TileLocs* const locs = tiles + (thread_index() - lane);
  const TileItems<Layout> items{src_pool, dst_pool, locs, shape.part_bytes};
  HISPARSE_NO_UNROLL
  for (uint32_t tile = first; tile < end; tile += items_per_tile) {
    const uint32_t count = end - tile < items_per_tile ? end - tile : items_per_tile;
    const bool is_mine = static_cast<uint32_t>(lane) < count;
    locs[lane] = is_mine ? find(tile + static_cast<uint32_t>(lane)) : TileLocs{-1, -1};
    warp_barrier();
    Copy<TileItems<Layout>> copy(items, static_cast<int32_t>(count), shape);
    copy.start(lane, kWarpSize);
    copy.finish();
    warp_barrier();
  }
}

// An even share of `count` for each warp of a grid. Neighbours go to different blocks: few still use all of
// them.
struct WarpShare {
  uint32_t first, end;

  __device__ __forceinline__ static WarpShare of(uint32_t count) {
    const auto warps = static_cast<uint32_t>(grid_size() * (block_size() / kWarpSize));
    const auto warp = static_cast<uint32_t>(thread_index() / kWarpSize * grid_size() + block_index());
    const uint32_t each = count / warps, more = count % warps;
    const uint32_t first = warp * each + (warp < more ? warp : more);
    return {static_cast<uint32_t>(warp_uniform(static_cast<int32_t>(first))),
            static_cast<uint32_t>(warp_uniform(static_cast<int32_t>(first + each + (warp < more))))};
  }
};

}  // namespace hisparse::HISPARSE_TARGET
