// The copy of a recorded miss plan: the misses of all rows are one run of items, split evenly among the warps
// of a small grid.
#pragma once

#include "block_scan.cuh"
#include "copy_share.cuh"
#include "params.h"

namespace hisparse::HISPARSE_TARGET {

// Lists the misses of all rows: each warp those that it copies.
class PlannedRows {
 public:
  __device__ __forceinline__ explicit PlannedRows(const PlannedCopyParams& params)
      : p_(params), locs_(locs_of_warp()) {}

  // Finds out how many this warp copies.
  __device__ __forceinline__ uint32_t count() const {
    return p_.are_few ? list_few() : share_.count_of(count_all());
  }

  __device__ __forceinline__ const TileLocs* tile(uint32_t done, uint32_t left) const {
    if (p_.are_few) return locs_ + done;
    TileLocs found{-1, -1};
    const auto lane = static_cast<uint32_t>(thread_index() % kWarpSize);
    if (lane < left) found = find(share_.item(done + lane));
    locs_[lane] = is_copied(found) ? found : TileLocs{-1, -1};
    warp_barrier();
    return locs_;
  }

 private:
  // What a warp may have to copy of few rows is an entry per lane. All are loaded beside the counts, and
  // those listed that turn out to be misses: counting first took 2 to 3 % longer for two rows (H200). Every
  // row begins at another warp, so that shares differ little.
  __device__ __forceinline__ uint32_t list_few() const {
    const uint32_t lane = static_cast<uint32_t>(thread_index() % kWarpSize);
    const int row = static_cast<int>(lane >> p_.log2_lanes_per_row);
    uint32_t place = share_.warp() + static_cast<uint32_t>(row) * p_.row_shift;
    if (place >= share_.warps()) place -= share_.warps();
    place += (lane & ((1u << p_.log2_lanes_per_row) - 1)) * share_.warps();
    const int real_rows = *p_.num_real_reqs;
    TileLocs found{-1, -1};
    uint32_t of_row = 0;
    if (row < p_.batch && place < static_cast<uint32_t>(p_.plan_width)) {
      found = load(row, place);
      of_row = clamped(p_.miss_count[row]);
    }
    const bool is_listed = row < real_rows && place < of_row && is_copied(found);
    const WarpVote vote = warp_vote(is_listed);
    if (is_listed) locs_[vote.before] = found;
    warp_barrier();
    return vote.all;
  }

  // Rows are counted in groups, one per thread of a block, so that any number of them fits in shared memory.
  // Up to as many rows as threads, a group is one row.
  __device__ __forceinline__ uint32_t count_all() const {
    const int real_rows = *p_.num_real_reqs;
    uint32_t of_group = 0;
    const int first = thread_index() * p_.rows_per_group;
    HISPARSE_NO_UNROLL
    for (int i = 0; i < p_.rows_per_group && first + i < p_.batch; ++i) {
      const uint32_t of_row = clamped(p_.miss_count[first + i]);
      if (first + i < real_rows) of_group += of_row;
    }
    const BlockScan scan = block_exclusive_sum(of_group, begins() + block_size());
    begins()[thread_index()] = scan.before;
    block_barrier();
    return scan.total;
  }

  __device__ __forceinline__ TileLocs find(uint32_t item) const {
    // The last group that begins at the item or before: those without items begin where the next one does.
    uint32_t group = 0, begin = 0;
    for (uint32_t step = p_.largest_step; step > 0; step /= 2) {
      if (group + step >= p_.groups) continue;
      const uint32_t later = begins()[group + step];
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

  // Where each group begins.
  __device__ __forceinline__ static uint32_t* begins() {
    return reinterpret_cast<uint32_t*>(reinterpret_cast<TileLocs*>(shared_memory()) + block_size());
  }

  const PlannedCopyParams& p_;
  const WarpShare share_;
  TileLocs* const locs_;
};

template <template <class> class Copy, class Layout>
__device__ __forceinline__ void copy_planned(const PlannedCopyParams& p) {
  const PlannedRows rows(p);
  const uint32_t count = rows.count();
  if (p.skip_io) return;
  copy_share<Copy, Layout>(count, p.host_cache.base, p.device_buffer.base, p.items_per_tile, p.shape, rows);
}

}  // namespace hisparse::HISPARSE_TARGET
