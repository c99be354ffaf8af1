// The opt-in check of contents: what the ops take on trust, looked at before they run. It changes nothing but
// its report.
#pragma once

#include "content_check.h"
#include "swap_in.cuh"

namespace hisparse::HISPARSE_TARGET {

__device__ __forceinline__ void report_fault(uint64_t* first_faults, Fault fault, int64_t row,
                                             int64_t column) {
  device_min(first_faults + static_cast<int>(fault),
             static_cast<uint64_t>(row) << 32 | static_cast<uint32_t>(column));
}

// Finds values that stand at several places, with two bitmaps in shared memory: seen, and seen again. A
// bitmap covers a range of values, so more values than bits take several rounds.
class Repeats {
 public:
  __device__ __forceinline__ explicit Repeats(int32_t bitmap_words)
      : seen_(reinterpret_cast<uint32_t*>(shared_memory())),
        again_(seen_ + bitmap_words),
        words_(bitmap_words) {}

  // Calls found(i) for every place i whose value, from 0 to limit - 1, another place has as well. For all
  // threads of the block together.
  template <class ValueAt, class Found>
  __device__ __forceinline__ void find(int count, int64_t limit, const ValueAt& value_at,
                                       const Found& found) const {
    const int64_t bits = int64_t{words_} * 32;
    HISPARSE_NO_UNROLL
    for (int64_t first = 0; first < limit; first += bits) {
      const int64_t range = limit - first < bits ? limit - first : bits;
      const int words = static_cast<int>((range + 31) / 32);
      block_barrier();
      HISPARSE_NO_UNROLL
      for (int i = thread_index(); i < words; i += block_size()) seen_[i] = again_[i] = 0;
      block_barrier();
      HISPARSE_NO_UNROLL
      for (int i = thread_index(); i < count; i += block_size()) {
        const int64_t value = value_at(i) - first;
        if (value < 0 || value >= range) continue;
        const uint32_t bit = 1u << (value & 31);
        if (shared_fetch_or(seen_ + (value >> 5), bit) & bit) shared_fetch_or(again_ + (value >> 5), bit);
      }
      block_barrier();
      HISPARSE_NO_UNROLL
      for (int i = thread_index(); i < count; i += block_size()) {
        const int64_t value = value_at(i) - first;
        if (value < 0 || value >= range) continue;
        if (again_[value >> 5] >> (value & 31) & 1) found(i);
      }
    }
  }

 private:
  uint32_t* const seen_;
  uint32_t* const again_;
  const int32_t words_;
};

// One block looks at one row of the batch, and the first one at the requests of all rows too.
__device__ __forceinline__ void check_swap_in(const SwapInCheckParams& params) {
  const SwapInParams& p = params.call;
  const int row = block_index(), thread = thread_index(), threads = block_size();
  const int slots = p.hot_buffer_size;
  const Repeats repeats(params.bitmap_words);
  const auto report = [&](Fault fault, int64_t column) {
    report_fault(params.first_faults, fault, row, column);
  };

  const int real_rows = p.num_real_reqs != nullptr ? min_of(*p.num_real_reqs, p.batch) : p.batch;
  const auto request_of = [&](int b) { return load_index(p.req_pool_indices, b); };
  if (row == 0) {
    repeats.find(real_rows, p.table_rows, request_of,
                 [&](int b) { report_fault(params.first_faults, Fault::kRepeatedRequest, b, 0); });
  }
  if (row >= real_rows) return;
  const int64_t request = request_of(row);
  if (request < 0 || request >= p.table_rows) {
    if (thread == 0) report(Fault::kRequest, 0);
    return;
  }
  const int64_t length = load_index(p.seq_lens, row);
  const bool is_short = length <= slots;

  // A short sequence uses its own slots alone, and nothing of the host.
  const int used_slots = !is_short ? slots + 1 : length > 0 ? static_cast<int>(length) : 0;
  const int32_t* const device_locs = p.device_buffer_locs + request * p.buffer_table_stride;
  HISPARSE_NO_UNROLL
  for (int slot = thread; slot < used_slots; slot += threads) {
    const int64_t loc = device_locs[slot];
    if (loc < 0 || loc >= p.device_buffer.rows) report(Fault::kDeviceLoc, slot);
  }
  const int32_t* const asked = p.top_k_tokens + row * p.top_k_stride;
  const int64_t* const host_locs = p.host_cache_locs + request * p.host_locs_stride;
  HISPARSE_NO_UNROLL
  for (int i = thread; i < p.num_top_k; i += threads) {
    const int64_t token = by_blocks(p) ? BlockSelection::token_at(p, asked, i) : asked[i];
    const bool is_from_host = !is_short && token != length - 1;
    // A block may reach past the end of the sequence.
    if (token == -1 || (by_blocks(p) && token >= length)) continue;
    if (token < 0 || token >= length || (is_from_host && token >= p.max_tokens)) {
      report(Fault::kToken, i);
    } else if (is_from_host && (host_locs[token] < 0 || host_locs[token] >= p.host_cache.rows)) {
      report(Fault::kHostLoc, token);
    }
  }
  if (is_short) return;

  const int32_t* const slot_tokens = p.device_buffer_tokens + request * p.buffer_table_stride;
  const int16_t* const lru = p.lru_slots + request * p.lru_stride;
  HISPARSE_NO_UNROLL
  for (int i = thread; i < slots; i += threads) {
    const int64_t token = slot_tokens[i];
    if (token < -1 || (token >= p.max_tokens && token != length - 1)) report(Fault::kSlotToken, i);
    if (lru[i] < 0 || lru[i] >= slots) report(Fault::kLruSlot, i);
  }
  repeats.find(
      slots, p.max_tokens, [&](int i) { return int64_t{slot_tokens[i]}; },
      [&](int i) { report(Fault::kRepeatedToken, i); });
  repeats.find(
      slots, slots, [&](int i) { return int64_t{lru[i]}; },
      [&](int i) { report(Fault::kRepeatedLruSlot, i); });
}

__device__ __forceinline__ void check_indices(const IndexCheckParams& params) {
  const int64_t step = int64_t{grid_size()} * block_size();
  HISPARSE_NO_UNROLL
  for (int64_t i = int64_t{block_index()} * block_size() + thread_index(); i < params.count; i += step) {
    HISPARSE_UNROLL
    for (int side = 0; side < 2; ++side) {
      if (params.indices[side][i] < params.rows[side]) continue;
      // A position may need more than the 32 bits of a column.
      device_min(
          params.first_faults + static_cast<int>(side == 0 ? Fault::kSourceIndex : Fault::kDestinationIndex),
          static_cast<uint64_t>(i));
    }
  }
}

}  // namespace hisparse::HISPARSE_TARGET
