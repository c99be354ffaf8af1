// The copy of a recorded miss plan: the misses of all rows are one run of items, split evenly among the warps
// of a small grid.
#pragma once

#include "block_scan.cuh"
#include "copy_share.cuh"
#include "params.h"

namespace hisparse::HISPARSE_TARGET {

// Rows are counted in groups, one per thread of a block, so that any number of them fits in shared memory. Up
// to as many rows as threads, a group is one row.
class PlannedRows {
 public:
  __device__ __forceinline__ PlannedRows(const PlannedCopyParams& params, uint32_t* begins)
      : p_(params), begins_(begins) {}

  // Counts the misses of all rows.
  __device__ __forceinline__ uint32_t count(uint32_t* warp_totals) const {
    const int real_rows = *p_.num_real_reqs;
    uint32_t of_group = 0;
    const int first = thread_index() * p_.rows_per_group;
    HISPARSE_NO_UNROLL
    for (int i = 0; i < p_.rows_per_group && first + i < p_.batch; ++i) {
      const uint32_t of_row = clamped(p_.miss_count[first + i]);
      if (first + i < real_rows) of_group += of_row;
    }
    const BlockScan scan = block_exclusive_sum(of_group, warp_totals);
    begins_[thread_index()] = scan.before;
    block_barrier();
    return scan.total;
  }

  __device__ __forceinline__ TileLocs find(uint32_t item) const {
    // The last group that begins at the item or before: those without items begin where the next one does.
    uint32_t group = 0, begin = 0;
    for (uint32_t step = p_.largest_step; step > 0; step /= 2) {
      if (group + step >= p_.groups) continue;
      const uint32_t later = begins_[group + step];
      if (later > item) continue;
      group += step;
      begin = later;
    }
    uint32_t place = item - begin;
    int row = static_cast<int>(group) * p_.rows_per_group;
    HISPARSE_NO_UNROLL
    for (int others = p_.rows_per_group - 1; others > 0; --others, ++row) {
      const uint32_t of_row = clamped(p_.miss_count[row]);
      if (place < of_row) break;
      place -= of_row;
    }
    return load(row, place);
  }

  __device__ __forceinline__ TileLocs load(int row, uint32_t place) const {
    const int64_t entry = row * p_.plan_stride + place;
    return {p_.miss_src[entry], p_.miss_dst[entry]};
  }

  __device__ __forceinline__ bool is_copied(const TileLocs& locs) const {
    return locs.src >= 0 && locs.src < p_.host_cache.rows && locs.dst >= 0 &&
           locs.dst < p_.device_buffer.rows;
  }

  // No more than the plan holds, whatever a row that no call wrote says.
  __device__ __forceinline__ uint32_t clamped(int32_t count) const {
    return static_cast<uint32_t>(count < 0 ? 0 : count < p_.plan_width ? count : p_.plan_width);
  }

 private:
  const PlannedCopyParams& p_;
  uint32_t* const begins_;
};

template <template <class> class Copy, class Layout>
__device__ __forceinline__ void copy_planned(const PlannedCopyParams& p) {
  TileLocs* const tiles = reinterpret_cast<TileLocs*>(shared_memory());
  uint32_t* const begins = reinterpret_cast<uint32_t*>(tiles + block_size());
  const PlannedRows rows(p, begins);
  const WarpShare share;
  const auto lane = static_cast<uint32_t>(thread_index() % kWarpSize);
  const uint32_t first_item = share.item(lane);
  const bool has_first = lane < p.items_per_tile;
  TileLocs first{-1, -1};
  uint32_t count;
  if (p.batch == 1) {
    // Three loads at once: none is looked at before all are under way.
    const int32_t real_rows = *p.num_real_reqs;
    const int32_t only = *p.miss_count;
    if (has_first && first_item < static_cast<uint32_t>(p.plan_width)) first = rows.load(0, first_item);
    count = real_rows > 0 ? rows.clamped(only) : 0;
  } else {
    count = rows.count(begins + block_size());
    if (has_first && first_item < count) first = rows.find(first_item);
  }
  if (p.skip_io) return;
  copy_share<Copy, Layout>(share, share.count_of(count), p.host_cache.base, p.device_buffer.base, tiles,
                           p.items_per_tile, p.shape, first, rows);
}

}  // namespace hisparse::HISPARSE_TARGET
