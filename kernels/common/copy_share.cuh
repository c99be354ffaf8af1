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

// What a warp does of a run of items: every so many of them, so that shares differ by at most one item, and a
// warp knows the first of its own before it knows how many there are. Neighbours go to different blocks: few
// items still use all of them.
class WarpShare {
 public:
  __device__ __forceinline__ WarpShare()
      : warp_(static_cast<uint32_t>(thread_index() / kWarpSize * grid_size() + block_index())),
        warps_(static_cast<uint32_t>(block_size() / kWarpSize * grid_size())) {}

  __device__ __forceinline__ uint32_t warp() const { return warp_; }
  __device__ __forceinline__ uint32_t warps() const { return warps_; }
  __device__ __forceinline__ uint32_t item(uint32_t number) const { return warp_ + number * warps_; }
  __device__ __forceinline__ uint32_t count_of(uint32_t items) const {
    uint32_t count = items > warp_ ? 1 : 0;
    if (items > warps_)
      count = (items + warps_ - 1 - warp_) / warps_;  // few items do not wait for a division
    return static_cast<uint32_t>(warp_uniform(static_cast<int32_t>(count)));
  }

 private:
  const uint32_t warp_, warps_;
};

// Copies `count` items of a warp. rows.tile(done, left) lists `left` of them, those after the first `done`,
// in shared memory, with a negative loc where there is nothing to copy.
template <template <class> class Copy, class Layout, class Rows>
__device__ __forceinline__ void copy_share(uint32_t count, const unsigned char* src_pool,
                                           unsigned char* dst_pool, uint32_t items_per_tile,
                                           const TileShape& shape, const Rows& rows) {
  HISPARSE_NO_UNROLL
  for (uint32_t done = 0; done < count; done += items_per_tile) {
    const uint32_t left = count - done < items_per_tile ? count - done : items_per_tile;
    const TileItems<Layout> items{src_pool, dst_pool, rows.tile(done, left), shape.part_bytes};
    Copy<TileItems<Layout>> copy(items, static_cast<int32_t>(left), shape);
    copy.start(thread_index() % kWarpSize, kWarpSize);
    copy.finish();
    warp_barrier();
  }
}

// The part of a warp in shared memory that holds a TileLocs for each thread.
__device__ __forceinline__ TileLocs* locs_of_warp() {
  return reinterpret_cast<TileLocs*>(shared_memory()) + thread_index() / kWarpSize * kWarpSize;
}

}  // namespace hisparse::HISPARSE_TARGET
