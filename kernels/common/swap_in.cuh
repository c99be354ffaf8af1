// The swap-in of one request, by one block or by several that make the same plan and share the copying.
#pragma once

#include "four.cuh"

namespace hisparse::HISPARSE_TARGET {

__device__ __forceinline__ int64_t load_index(const IndexVector& vector, int row) {
  return vector.is_int64 ? static_cast<const int64_t*>(vector.data)[row] : static_cast<const int32_t*>(vector.data)[row];
}

__device__ __forceinline__ int min_of(int a, int b) { return a < b ? a : b; }

// The part of 0 .. count-1 that one thread looks after.
struct Share {
  int first;
  int end;
  int stride;
};

// What a thread loads for its first two turns, kept in registers across barriers: enough for 1024 threads to have all of
// a hot buffer of 8192 on its way at once. Later turns load when they come.
template <class T>
struct Prefetched {
  T first{};
  T second{};

  template <class Load>
  __device__ __forceinline__ void start(const Share& share, Load load) {
    if (share.first < share.end) first = load(share.first);
    if (share.first + share.stride < share.end) second = load(share.first + share.stride);
  }

  template <class Load>
  __device__ __forceinline__ T get(int turn, int index, Load load) const {
    const T one = first, two = second;  // both are read: a choice between the members would put them into memory
    if (turn >= 2) return load(index);
    return turn == 0 ? one : two;
  }
};

// Calls step(turn, index) for the indices of a share. One copy of the code, whatever the number of turns.
template <class Step>
__device__ __forceinline__ void for_each(const Share& share, Step step) {
  int turn = 0;
  HISPARSE_NO_UNROLL
  for (int index = share.first; index < share.end; index += share.stride) step(turn++, index);
}

// The misses of one request in miss order, in shared memory.
struct MissItems {
  const int64_t* host_locs;  // negative: not to be copied
  const int32_t* device_locs;
  const unsigned char* src;
  unsigned char* dst;
  int64_t item_bytes;

  __device__ __forceinline__ bool locate(int64_t item, const unsigned char*& from, unsigned char*& to) const {
    const int64_t host_loc = host_locs[item];
    from = src + host_loc * item_bytes;
    to = dst + device_locs[item] * item_bytes;
    return host_loc >= 0;
  }
};

template <template <class> class Copy>
class SwapIn {
 public:
  __device__ __forceinline__ explicit SwapIn(const SwapInParams& params)
      : p_(params),
        row_(block_index() / params.blocks_per_request),
        part_(block_index() % params.blocks_per_request),
        thread_(thread_index()),
        threads_(block_size()),
        top_k_(params.top_k_tokens + row_ * params.top_k_stride),
        out_(params.top_k_device_locs + row_ * params.device_locs_stride) {}

  __device__ __forceinline__ void run() {
    const int real_rows = p_.num_real_reqs != nullptr ? *p_.num_real_reqs : p_.batch;
    const int64_t request = load_index(p_.req_pool_indices, row_);
    int64_t seq_len = load_index(p_.seq_lens, row_);
    if (row_ >= real_rows) {
      if (part_ == 0) write_padding();
      return;
    }
    if (request < 0 || request >= p_.table_rows) seq_len = 0;  // outside the tables: no token is anywhere
    tokens_ = p_.device_buffer_tokens + request * p_.buffer_table_stride;
    locs_ = p_.device_buffer_locs + request * p_.buffer_table_stride;
    host_locs_ = p_.host_cache_locs + request * p_.host_locs_stride;
    lru_ = p_.lru_slots + request * p_.lru_stride;
    if (seq_len <= p_.hot_buffer_size) {
      if (part_ == 0) write_short(static_cast<int32_t>(seq_len));
    } else {
      swap_in(static_cast<uint32_t>(seq_len < int64_t{1} << 31 ? seq_len : int64_t{1} << 31));
    }
  }

 private:
  // What `places` holds per cell: kNowhere, the first place in the row of a token that is not resident, or the complement
  // of a slot, marked where this call fills it.
  static constexpr int32_t kNowhere = INT32_MAX;
  static constexpr int32_t kFilled = 1 << 16;
  static constexpr int32_t kSlotMask = kFilled - 1;
  // Marks a hit in the staged LRU row.
  static constexpr uint16_t kHit = 1 << 15;
  // The word of scratch behind the warp totals.
  static constexpr int kArrived = 32;

  __device__ __forceinline__ void write_padding() const {
    HISPARSE_NO_UNROLL
    for (int i = thread_; i < p_.num_top_k; i += threads_) out_[i] = -1;
  }

  __device__ __forceinline__ void write_short(int32_t seq_len) const {
    HISPARSE_NO_UNROLL
    for (int i = thread_; i < p_.num_top_k; i += threads_) {
      const int32_t token = top_k_[i];
      out_[i] = token >= 0 && token < seq_len ? locs_[token] : -1;
    }
    if (p_.miss_count != nullptr && thread_ == 0) p_.miss_count[row_] = 0;
  }

  __device__ __forceinline__ void swap_in(uint32_t seq_len) {
    unsigned char* const shared = shared_memory();
    const SwapInLayout& at = p_.layout;
    int32_t* const keys = reinterpret_cast<int32_t*>(shared + at.keys);
    int32_t* const places = reinterpret_cast<int32_t*>(shared + at.places);
    uint16_t* const staged_lru = reinterpret_cast<uint16_t*>(shared + at.lru);
    uint8_t* const hits = shared + at.hits;
    uint16_t* const entry_cells = reinterpret_cast<uint16_t*>(shared + at.entry_cells);
    uint32_t* const scratch = reinterpret_cast<uint32_t*>(shared + at.scratch);
    // These two take over the room of the keys and of the hits, which nobody reads any more by then.
    int64_t* const miss_host_locs = reinterpret_cast<int64_t*>(shared + at.keys);
    int32_t* const miss_device_locs = reinterpret_cast<int32_t*>(shared + at.hits);

    const int slots = p_.hot_buffer_size;
    const int cells = 1 << p_.table_bits;
    const int newest_cell = cells;
    const int nowhere_cell = cells + 1;
    const TokenTable table(keys, p_.table_bits);

    // Slots are looked at by number, dealt out in groups of four, and in LRU order, a run of groups per thread.
    const Share groups{thread_ * 4, slots, threads_ * 4};
    const Share recent = run_of(slots, 4);
    const Share entries = run_of(p_.num_top_k, 1);
    const bool tokens_aligned = is_aligned_for_four(tokens_);
    const bool lru_aligned = is_aligned_for_four(lru_);
    const auto load_asked = [&](int i) { return top_k_[i]; };
    const auto load_resident = [&](int slot) { return load_four(tokens_, slot, slots, tokens_aligned, int32_t{-1}); };
    const auto load_recent = [&](int i) { return load_four(lru_, i, recent.end, lru_aligned, int16_t{0}); };

    // All loads that need nothing but the row are on their way before the first barrier.
    Prefetched<int32_t> asked;
    Prefetched<Four<int32_t>> resident;
    Prefetched<Four<int16_t>> lru;
    asked.start(entries, load_asked);
    resident.start(groups, load_resident);
    lru.start(recent, load_recent);

    HISPARSE_NO_UNROLL
    for (int i = thread_ * 4; i < cells; i += threads_ * 4) {
      constexpr int32_t kEmpty = TokenTable::kEmpty;
      put_four(keys + i, {kEmpty, kEmpty, kEmpty, kEmpty});
      put_four(places + i, {kNowhere, kNowhere, kNowhere, kNowhere});
    }
    if (thread_ == 0) {
      places[newest_cell] = ~slots;
      places[nowhere_cell] = kNowhere;
    }
    block_barrier();

    for_each(entries, [&](int turn, int i) {
      const int32_t token = asked.get(turn, i, load_asked);
      int32_t cell = nowhere_cell;
      if (static_cast<uint32_t>(token) < seq_len - 1) {
        cell = table.insert(token);
        shared_min(places + cell, i);
      } else if (static_cast<uint32_t>(token) == seq_len - 1) {
        cell = newest_cell;
      }
      entry_cells[i] = static_cast<uint16_t>(cell);
    });
    for_each(recent, [&](int turn, int i) {
      const Four<int16_t> four = lru.get(turn, i, load_recent);
      Four<uint16_t> staged;
      HISPARSE_UNROLL
      for (int j = 0; j < 4; ++j) staged.at[j] = static_cast<uint16_t>(min_of(four.at[j] & (kHit - 1), slots - 1));
      put_four(staged_lru + i, staged);
    });
    block_barrier();

    for_each(groups, [&](int turn, int slot) {
      const Four<int32_t> found = table.find(resident.get(turn, slot, load_resident));
      Four<uint8_t> hit;
      HISPARSE_UNROLL
      for (int j = 0; j < 4; ++j) {
        hit.at[j] = found.at[j] >= 0;
        if (found.at[j] >= 0) places[found.at[j]] = ~(slot + j);
      }
      put_four(hits + slot, hit);
    });
    block_barrier();

    // This block has read the tables for the last time, so it may arrive. The values above have been used, hence
    // loaded: a relaxed arrival is enough for the last block to overwrite them.
    const bool shares_request = p_.blocks_per_request > 1;
    uint32_t arrived = 0;
    if (shares_request && thread_ == 0) arrived = device_fetch_add(p_.arrivals + row_, 1);

    uint32_t free_slots = 0;
    for_each(recent, [&](int, int i) {
      Four<uint16_t> staged = get_four(staged_lru + i);
      HISPARSE_UNROLL
      for (int j = 0; j < 4; ++j) {
        const bool hit = hits[staged.at[j]] != 0;
        if (hit) staged.at[j] |= kHit;
        free_slots += !hit && i + j < recent.end;
      }
      put_four(staged_lru + i, staged);
    });
    // The host locs of the misses arrive while the block counts.
    const auto load_host_loc = [&](int i) {
      const int64_t token = top_k_[i];
      return token < p_.max_tokens ? host_locs_[token] : -1;
    };
    uint32_t misses = 0;
    for_each(entries, [&](int, int i) { misses += places[entry_cells[i]] == i; });
    Prefetched<int64_t> host_loc;
    if (misses > 0) host_loc.start(entries, [&](int i) { return places[entry_cells[i]] == i ? load_host_loc(i) : -1; });

    // Both counts in one scan: neither sum exceeds 32768.
    const BlockScan scan = block_exclusive_sum(free_slots | misses << 16, scratch);
    const int free_before = static_cast<int>(scan.before & 0xFFFF);
    const int all_free = static_cast<int>(scan.total & 0xFFFF);
    // A broken table, with one token in several slots, may leave too few: the misses beyond go nowhere.
    const int all_misses = min_of(static_cast<int>(scan.total >> 16), all_free);

    int free_rank = free_before;
    HISPARSE_NO_UNROLL
    for (int i = recent.first; i < recent.end && free_rank < all_misses; ++i)
      if (!(staged_lru[i] & kHit)) miss_device_locs[free_rank++] = staged_lru[i];
    block_barrier();

    int miss_rank = static_cast<int>(scan.before >> 16);
    for_each(entries, [&](int turn, int i) {
      const int cell = entry_cells[i];
      if (places[cell] != i) return;
      if (miss_rank >= all_misses) {
        places[cell] = kNowhere;
        return;
      }
      const int32_t slot = miss_device_locs[miss_rank];
      const int32_t device_loc = locs_[slot];
      const int64_t from = host_loc.get(turn, i, load_host_loc);
      const bool in_pools = from >= 0 && from < p_.host_cache.rows && device_loc >= 0 && device_loc < p_.device_buffer.rows;
      miss_device_locs[miss_rank] = device_loc;
      miss_host_locs[miss_rank] = in_pools ? from : -1;
      places[cell] = ~(slot | kFilled);
      ++miss_rank;
    });
    if (shares_request && thread_ == 0) scratch[kArrived] = arrived;
    block_barrier();
    const bool is_last = !shares_request || scratch[kArrived] == static_cast<uint32_t>(p_.blocks_per_request - 1);

    const MissItems items{miss_host_locs, miss_device_locs, p_.host_cache.base, p_.device_buffer.base, p_.item_size_bytes};
    Copy<MissItems> copy(items, p_.skip_io ? 0 : all_misses, static_cast<int32_t>(p_.item_size_bytes), p_.copy_word_bytes,
                         part_ * threads_ + thread_, p_.blocks_per_request * threads_);
    copy.start();
    if (part_ == 0) {
      for_each(entries, [&](int, int i) {
        const int32_t place = places[entry_cells[i]];
        out_[i] = place < 0 ? locs_[~place & kSlotMask] : -1;
      });
      if (p_.miss_count != nullptr) record_plan(miss_host_locs, miss_device_locs, all_misses);
    }
    if (is_last) {
      for_each(entries, [&](int, int i) {
        const int32_t place = places[entry_cells[i]];
        if (place < 0 && (~place & kFilled)) tokens_[~place & kSlotMask] = top_k_[i];
      });
      rewrite_lru(staged_lru, recent, free_before, all_free, all_misses);
      if (shares_request && thread_ == 0) p_.arrivals[row_] = 0;
    }
    copy.finish();
  }

  // New order: free slots that stay free, filled slots, hit slots; each in its old order.
  __device__ __forceinline__ void rewrite_lru(const uint16_t* staged_lru, const Share& recent, int free_rank, int all_free,
                                              int all_misses) const {
    for_each(recent, [&](int, int i) {
      const Four<uint16_t> staged = get_four(staged_lru + i);
      HISPARSE_UNROLL
      for (int j = 0; j < 4; ++j) {
        const bool hit = staged.at[j] & kHit;
        const int rotated = free_rank < all_misses ? all_free - all_misses + free_rank : free_rank - all_misses;
        const int position = hit ? all_free + i + j - free_rank : rotated;
        free_rank += !hit;
        if (i + j < recent.end) lru_[position] = static_cast<int16_t>(staged.at[j] & (kHit - 1));
      }
    });
  }

  __device__ __forceinline__ void record_plan(const int64_t* host_locs, const int32_t* device_locs, int misses) const {
    int64_t* const src = p_.miss_src + row_ * p_.plan_stride;
    int32_t* const dst = p_.miss_dst + row_ * p_.plan_stride;
    HISPARSE_NO_UNROLL
    for (int i = thread_; i < misses; i += threads_) {
      src[i] = host_locs[i];
      dst[i] = device_locs[i];
    }
    if (thread_ == 0) p_.miss_count[row_] = misses;
  }

  // An even run of 0 .. count-1 for this thread, in steps of `multiple`.
  __device__ __forceinline__ Share run_of(int count, int multiple) const {
    const int share = (count + threads_ - 1) / threads_;
    const int run = (share + multiple - 1) / multiple * multiple;
    return {thread_ * run, min_of(thread_ * run + run, count), multiple};
  }

  const SwapInParams& p_;
  const int row_;
  const int part_;
  const int thread_;
  const int threads_;
  const int32_t* const top_k_;
  int32_t* const out_;
  int32_t* tokens_ = nullptr;
  const int32_t* locs_ = nullptr;
  const int64_t* host_locs_ = nullptr;
  int16_t* lru_ = nullptr;
};

}  // namespace hisparse::HISPARSE_TARGET
