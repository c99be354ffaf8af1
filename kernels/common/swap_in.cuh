// The swap-in of one request, by one block or by several that make the same plan and share the copying.
#pragma once

#include "block_scan.cuh"
#include "four.cuh"
#include "index_vector.cuh"
#include "item_address.cuh"
#include "params.h"
#include "recent_slots.cuh"
#include "token_table.cuh"
#include "turns.cuh"

namespace hisparse::HISPARSE_TARGET {

__device__ __forceinline__ int min_of(int a, int b) { return a < b ? a : b; }

// The misses of one request in miss order, in shared memory; each is as many items as there are pools.
template <class Layout>
struct MissItems {
  using Index = int32_t;
  static constexpr int32_t kTailAt = Layout::kTailAt;

  const int64_t* host_locs;  // negative: not in the pool, and not to be copied
  const int32_t* device_locs;
  const SwapInParams& p;

  __device__ __forceinline__ bool locate(Index item, int32_t at, const unsigned char*& from,
                                         unsigned char*& to) const {
    const bool is_value = Layout::kPools == 2 && item % 2 != 0;
    const int64_t host_loc = host_locs[item / Layout::kPools];
    const auto device_loc = static_cast<uint32_t>(device_locs[item / Layout::kPools]);
    from =
        item_address<Layout>(is_value ? p.host_values : p.host_cache.base, host_loc, at, p.copy.item_bytes);
    to = item_address<Layout>(is_value ? p.device_values : p.device_buffer.base, device_loc, at,
                              p.copy.item_bytes);
    return host_loc >= 0 && device_loc < p.device_buffer.rows;
  }
};

// What a row asks for: a token per entry, or one block of tokens after the other. -1 and tokens outside the
// sequence are none.
struct TokenSelection {
  static constexpr bool kRowHoldsTokens = true;
  __device__ __forceinline__ static int32_t token_at(const SwapInParams&, const int32_t* row, int entry) {
    return row[entry];
  }
};
struct BlockSelection {
  static constexpr bool kRowHoldsTokens = false;
  __device__ __forceinline__ static int32_t token_at(const SwapInParams& p, const int32_t* row, int entry) {
    const auto at = static_cast<uint32_t>(entry);
    const uint32_t index = p.blocks.index_of(at);
    const int32_t block = row[index];
    const uint64_t token =
        uint64_t{static_cast<uint32_t>(block)} * p.blocks.tokens + (at - index * p.blocks.tokens);
    return block >= 0 && token <= INT32_MAX ? static_cast<int32_t>(token) : -1;
  }
};

// kSlotsPerThread is 4 or 8, with at most kEntriesInRegisters entries per thread, or 0 for any number of
// both.
template <template <class> class Copy, class Layout, class Selection, int kSlotsPerThread>
class SwapIn {
 public:
  __device__ __forceinline__ explicit SwapIn(const SwapInParams& params)
      : p_(params),
        row_(block_index()),
        thread_(thread_index()),
        threads_(block_size()),
        top_k_(settled(params.top_k_tokens + row_ * params.top_k_stride)) {}

  __device__ __forceinline__ void run() {
    const int real_rows = p_.num_real_reqs != nullptr ? *p_.num_real_reqs : p_.batch;
    const int64_t request = load_index(p_.req_pool_indices, row_);
    int64_t seq_len = load_index(p_.seq_lens, row_);
    // What needs nothing of these comes before the first look at them.
    const Share runs{thread_ * entries_per_thread(),
                     min_of((thread_ + 1) * entries_per_thread(), p_.num_top_k), kRun};
    Asked asked;
    for_all<kRunTurns>(runs,
                       [&](int turn, int first) { asked.start(turn, [&] { return load_run(first); }); });

    if (row_ >= real_rows) {
      if (block_part() == 0) write_padding();
      return;
    }
    // Outside the tables no token is anywhere.
    if (request < 0 || request >= p_.table_rows || seq_len < 0) seq_len = 0;
    request_ = static_cast<uint32_t>(request);
    locs_ = settled(p_.device_buffer_locs + request_ * p_.buffer_table_stride);
    if (seq_len <= p_.hot_buffer_size) {
      if (block_part() == 0) write_short(static_cast<int32_t>(seq_len));
    } else {
      swap_in(static_cast<uint32_t>(seq_len < int64_t{1} << 31 ? seq_len : int64_t{1} << 31), runs, asked);
    }
  }

 private:
  static constexpr int kGroupTurns = kSlotsPerThread / 4;
  static constexpr int kEntryTurns = kSlotsPerThread > 0 ? kEntriesInRegisters : 0;
  // A thread takes a run of entries at once, or in many turns.
  static constexpr int kRun = kEntryTurns > 0 ? kEntryTurns : 1;
  static constexpr int kRunTurns = kEntryTurns > 0 ? 1 : 0;
  using Run = Neighbours<int32_t, kRun>;
  using Asked = Early<Run, kRunTurns>;

  // What `places` holds: the first entry that asks for the token of this one, if the token is not resident,
  // or its device loc, marked. Once the misses are counted, the rank of a miss, marked, or nothing.
  static constexpr int32_t kNowhere = INT32_MAX;
  static constexpr int32_t kResident = INT32_MIN;
  static constexpr int32_t kFilled = 1 << 16;
  static constexpr int32_t kRankMask = kFilled - 1;
  // Marks an entry that is the first of a token that is not resident.
  static constexpr int32_t kMiss = 1 << 15;
  static constexpr int32_t kEntryMask = kMiss - 1;
  // Stores of single slots touch 8 to 16 sectors each: a quarter of the time at H=8192 on H200. A row that is
  // staged has no room to be put together beside itself.
  static constexpr bool kLruGoesThroughShared = kSlotsPerThread > 0;
  // Words of scratch behind the warp totals.
  static constexpr int kArrived = 32;

  using Recent = Kept<RecentSlots, Four<uint16_t>, kGroupTurns>;

  __device__ __forceinline__ void write_padding() const {
    int32_t* const out = out_row();
    HISPARSE_NO_UNROLL
    for (int i = thread_; i < p_.num_top_k; i += threads_) out[i] = -1;
  }

  __device__ __forceinline__ void write_short(int32_t seq_len) const {
    int32_t* const out = out_row();
    HISPARSE_NO_UNROLL
    for (int i = thread_; i < p_.num_top_k; i += threads_) {
      const int32_t token = token_at(i);
      out[i] = token >= 0 && token < seq_len ? locs_[token] : -1;
    }
    if (p_.miss_count != nullptr && thread_ == 0) p_.miss_count[row_] = 0;
  }

  __device__ __forceinline__ void swap_in(uint32_t seq_len, const Share& runs, const Asked& asked) {
    int32_t* const tokens_row = settled(p_.device_buffer_tokens + request_ * p_.buffer_table_stride);
    int16_t* const lru_row = settled(p_.lru_slots + request_ * p_.lru_stride);
    unsigned char* const shared = settled_shared(shared_memory());
    const SwapInLayout& at = p_.layout;
    int32_t* const places = settled_shared(reinterpret_cast<int32_t*>(shared + at.places));
    uint8_t* const hits = settled_shared(shared + at.hits);
    int32_t* const slot_locs = reinterpret_cast<int32_t*>(shared + at.locs);
    uint32_t* const scratch = reinterpret_cast<uint32_t*>(shared + at.scratch);
    uint16_t* const victims = reinterpret_cast<uint16_t*>(shared + at.victims);
    // These two take over the room of the table and of the hits, which nobody reads any more by then.
    int64_t* const miss_host_locs = reinterpret_cast<int64_t*>(shared + at.table);
    int32_t* const miss_device_locs = reinterpret_cast<int32_t*>(shared + at.hits);

    const int slots = p_.hot_buffer_size;
    const int no_slot = (slots + 3) & ~3;  // behind the last group of four
    const uint32_t newest = seq_len - 1;
    const TokenTable table(shared, at, p_.num_top_k, newest);

    // Slots are looked at by number, dealt out in groups of four, and in LRU order, a run of groups per
    // thread.
    const Share groups{thread_ * 4, slots, threads_ * 4};
    const Share recent = run_of(slots, kSlotsPerThread > 0 ? kSlotsPerThread : p_.slots_per_thread, 4);
    const bool aligned = p_.rows_are_aligned;
    const auto load_resident = [&](int slot) {
      return load_four(tokens_row, slot, slots, aligned, int32_t{-1});
    };
    const auto load_locs = [&](int slot) { return load_four(locs_, slot, slots, aligned, int32_t{0}); };
    const auto load_recent = [&](int i) { return RawSlots::load(lru_row, i, recent.end, aligned); };

    // All loads that need nothing but the row are on their way before the first barrier.
    Early<Four<int32_t>, kGroupTurns> resident, resident_locs;
    Early<RawSlots, kGroupTurns> loaded_lru;
    for_each<kGroupTurns>(groups, [&](int turn, int slot) {
      resident.start(turn, [&] { return load_resident(slot); });
      resident_locs.start(turn, [&] { return load_locs(slot); });
    });
    for_each<kGroupTurns>(recent,
                          [&](int turn, int i) { loaded_lru.start(turn, [&] { return load_recent(i); }); });
    const int32_t newest_loc = thread_ == 0 ? locs_[slots] : 0;

    // Entries that are no token to look up have two places of their own.
    const Share entries{runs.first, runs.end, 1};
    Kept<int32_t, uint16_t, kEntryTurns> stands_for(shared + at.entries);
    const int at_newest = static_cast<int>(at.places_end), nowhere = at_newest + 1;
    for_all<kRunTurns>(runs, [&](int turn, int first) {
      Run tokens = asked.get(turn, [&] { return load_run(first); });
      Run own;
      HISPARSE_UNROLL
      for (int j = 0; j < kRun; ++j) {
        const bool is_token = static_cast<uint32_t>(tokens.at[j]) < newest;
        const bool is_newest = static_cast<uint32_t>(tokens.at[j]) == newest;
        own.at[j] = first + j;
        stands_for.set(j, first + j, is_token ? first + j : is_newest ? at_newest : nowhere);
        if (!is_token) tokens.at[j] = TokenTable::kNone;
      }
      put_neighbours(places + first, own);
      table.put(first, tokens);
    });
    block_barrier();

    if (table.has_chains()) {
      for_all<kEntryTurns>(entries, [&](int turn, int i) {
        if (stands_for.get(turn, i) == i) table.chain(i, table.token_of(i));
      });
      block_barrier();
    }

    // Of a token that stands several times the first entry counts. A device loc beats every entry: both are a
    // minimum, so that their order does not matter.
    for_all<kEntryTurns>(entries, [&](int turn, int i) {
      if (stands_for.get(turn, i) != i) return;
      const int32_t entry = table.find_own(kRunTurns > 0 ? asked.get(0, [] { return Run{}; }).at[turn % kRun]
                                                         : table.token_of(i));
      shared_min(places + entry, i, entry != i);
      stands_for.set(turn, i, entry);
    });
    for_each<kGroupTurns>(groups, [&](int turn, int slot) {
      const Four<int32_t> entry = table.find(resident.get(turn, [&] { return load_resident(slot); }));
      const Four<int32_t> locs = resident_locs.get(turn, [&] { return load_locs(slot); });
      Four<uint8_t> hit;
      HISPARSE_UNROLL
      for (int j = 0; j < 4; ++j) {
        // What a broken LRU row may name behind the last slot is nobody's victim.
        hit.at[j] = entry.at[j] >= 0 || slot + j >= slots;
        shared_min(places + entry.at[j], locs.at[j] | kResident, entry.at[j] >= 0);
      }
      put_neighbours(hits + slot, hit);
      if (at.has_locs) put_neighbours(slot_locs + slot, locs);
    });
    if (thread_ == 0) {
      places[at_newest] = newest_loc | kResident;
      places[nowhere] = kNowhere;
      hits[no_slot] = 1;  // nobody's victim
    }
    Recent lru(shared + at.lru);
    for_each<kGroupTurns>(recent, [&](int turn, int i) {
      lru.set(turn, i / 4,
              loaded_lru.get(turn, [&] { return load_recent(i); })
                  .unpacked(aligned, static_cast<uint32_t>(no_slot)));
    });
    block_barrier();

    // This block has read the tables for the last time, so it may arrive. The values above have been used,
    // hence loaded: a relaxed arrival is enough for the last block to overwrite them.
    const bool shares_request = p_.blocks_per_request > 1;
    uint32_t arrived = 0;
    if (shares_request && thread_ == 0) arrived = device_fetch_add(p_.arrivals + row_, 1);

    // The host locs of the misses arrive while the block counts.
    const int64_t* const host_locs_row = p_.host_cache_locs + request_ * p_.host_locs_stride;
    const auto load_host_loc = [&](int i) {
      const int64_t token = table.token_of(i);
      return token < p_.max_tokens ? host_locs_row[token] : -1;
    };
    uint32_t misses = 0;
    Early<int32_t, kEntryTurns> known_place;
    Early<int64_t, kEntryTurns> host_loc;
    for_all<kEntryTurns>(entries, [&](int turn, int i) {
      const int32_t entry = stands_for.get(turn, i);
      const int32_t place = places[entry];
      known_place.start(turn, [&] { return place; });
      if (place != i) return;
      ++misses;
      stands_for.set(turn, i, entry | kMiss);
      host_loc.start(turn, [&] { return load_host_loc(i); });
    });
    uint32_t free_slots = 0;
    for_each<kGroupTurns>(recent, [&](int turn, int i) {
      RecentSlots four = lru.get(turn, i / 4);
      HISPARSE_UNROLL
      for (int j = 0; j < 4; ++j) four.hits |= static_cast<uint32_t>(hits[four.slot(j)]) << j;
      free_slots += 4 - population_count(four.hits);
      lru.set(turn, i / 4, four);
    });

    // Both counts in one scan: neither sum exceeds 32768.
    const BlockScan scan = block_exclusive_sum(free_slots | misses << 16, scratch);
    const int free_before = static_cast<int>(scan.before & 0xFFFF);
    const int all_free = static_cast<int>(scan.total & 0xFFFF);
    // A broken table, with one token in several slots, may leave too few: the misses beyond go nowhere.
    const int all_misses = min_of(static_cast<int>(scan.total >> 16), all_free);

    // Each miss is put together from two sides: here the slot that it takes, below the item that it brings.
    const bool records = p_.miss_count != nullptr && block_part() == 0;
    if (free_before < all_misses) {
      int first_rank = free_before;
      for_each<kGroupTurns>(recent, [&](int turn, int i) {
        const RecentSlots four = lru.get(turn, i / 4);
        int rank[4], device_loc[4];
        HISPARSE_UNROLL
        for (int j = 0; j < 4; ++j) {
          rank[j] = four.is_hit(j) ? all_misses : first_rank;
          first_rank += !four.is_hit(j);
          if (rank[j] < all_misses)
            device_loc[j] = at.has_locs ? slot_locs[four.slot(j)] : load_global(locs_ + four.slot(j));
        }
        HISPARSE_UNROLL
        for (int j = 0; j < 4; ++j) {
          if (rank[j] >= all_misses) continue;
          victims[rank[j]] = static_cast<uint16_t>(four.slot(j));
          miss_device_locs[rank[j]] = device_loc[j];
          if (records) p_.miss_dst[row_ * p_.plan_stride + rank[j]] = device_loc[j];
        }
      });
    }
    if (misses > 0) {
      int rank = static_cast<int>(scan.before >> 16);
      for_all<kEntryTurns>(entries, [&](int turn, int i) {
        const int32_t entry = stands_for.get(turn, i);
        if (!(entry & kMiss)) return;
        const int64_t from = host_loc.get(turn, [&] { return load_host_loc(i); });
        if (rank < all_misses) {
          const bool in_pool = from >= 0 && from < p_.host_cache.rows;
          miss_host_locs[rank] = in_pool ? from : -1;
          if (records) p_.miss_src[row_ * p_.plan_stride + rank] = from;
        }
        places[entry & kEntryMask] = rank < all_misses ? rank | kFilled : kNowhere;
        ++rank;
      });
    }
    int16_t* const new_lru = reinterpret_cast<int16_t*>(shared + at.lru);
    const auto put_into = [&](int16_t* row) { reorder(row, lru, recent, free_before, all_free, all_misses); };
    if (kLruGoesThroughShared) put_into(new_lru);
    if (shares_request && thread_ == 0) scratch[kArrived] = arrived;
    block_barrier();
    const bool is_last =
        !shares_request || scratch[kArrived] == static_cast<uint32_t>(p_.blocks_per_request - 1);

    const MissItems<Layout> items{miss_host_locs, miss_device_locs, p_};
    Copy<MissItems<Layout>> copy(items, all_misses * Layout::kPools, p_.copy);
    const bool copies = all_misses > 0 && !p_.skip_io;
    if (copies) copy.start(block_part() * threads_ + thread_, p_.blocks_per_request * threads_);
    if (block_part() == 0) {
      int32_t* const out = out_row();
      for_all<kRunTurns>(runs, [&](int, int first) {
        Run locs;
        HISPARSE_UNROLL
        for (int j = 0; j < kRun; ++j) {
          const int32_t entry = stands_for.get(j, first + j) & kEntryMask;
          int32_t place = known_place.get(j, [&] { return places[entry]; });
          if (place >= 0) place = places[entry];
          locs.at[j] = place < 0           ? place & ~kResident
                       : place == kNowhere ? -1
                                           : miss_device_locs[place & kRankMask];
        }
        store_run(out, first, locs);
      });
      if (p_.miss_count != nullptr && thread_ == 0) p_.miss_count[row_] = all_misses;
    }
    if (is_last) {
      if (all_misses > 0) {
        for_all<kEntryTurns>(entries, [&](int turn, int i) {
          const int32_t entry = stands_for.get(turn, i);
          if (!(entry & kMiss)) return;
          const int32_t place = places[entry & kEntryMask];
          if (place != kNowhere) tokens_row[victims[place & kRankMask]] = table.token_of(i);
        });
      }
      if (kLruGoesThroughShared) {
        write_row(lru_row, new_lru, slots, aligned);
      } else {
        put_into(lru_row);
      }
      if (shares_request && thread_ == 0) p_.arrivals[row_] = 0;
    }
    if (copies) copy.finish();
  }

  // Puts the slots into their new order: free slots that stay free, filled slots, hit slots; each in its old
  // order. So the free ones rotate.
  __device__ __forceinline__ void reorder(int16_t* row, const Recent& lru, const Share& recent,
                                          int free_before, int all_free, int all_misses) const {
    int rotated = free_before - all_misses;
    int hit_position = all_free + recent.first - free_before;
    for_each<kGroupTurns>(recent, [&](int turn, int i) {
      const RecentSlots four = lru.get(turn, i / 4);
      HISPARSE_UNROLL
      for (int j = 0; j < 4; ++j) {
        const bool hit = four.is_hit(j);
        const int position = hit ? hit_position : rotated < 0 ? rotated + all_free : rotated;
        hit_position += hit;
        rotated += !hit;
        if (kLruGoesThroughShared || i + j < recent.end) row[position] = static_cast<int16_t>(four.slot(j));
      }
    });
  }

  __device__ __forceinline__ void write_row(int16_t* row, const int16_t* from, int count,
                                            bool aligned) const {
    if (aligned) {
      HISPARSE_NO_UNROLL
      for (int i = thread_ * 4; i < count; i += threads_ * 4)
        put_neighbours(row + i, get_neighbours<4>(from + i));
    } else {
      HISPARSE_NO_UNROLL
      for (int i = thread_; i < count; i += threads_) row[i] = from[i];
    }
  }

  __device__ __forceinline__ int32_t token_at(int entry) const {
    return Selection::token_at(p_, top_k_, entry);
  }

  // Nothing is asked for past the end.
  __device__ __forceinline__ Run load_run(int first) const {
    if constexpr (Selection::kRowHoldsTokens && kRun > 1) {
      if (p_.runs_are_aligned && first < p_.num_top_k) return get_neighbours<kRun>(top_k_ + first);
    }
    Run tokens;
    HISPARSE_UNROLL
    for (int j = 0; j < kRun; ++j) tokens.at[j] = first + j < p_.num_top_k ? token_at(first + j) : -1;
    return tokens;
  }

  __device__ __forceinline__ void store_run(int32_t* row, int first, const Run& locs) const {
    if (kRun > 1 && p_.runs_are_aligned) {
      if (first < p_.num_top_k) put_neighbours(row + first, locs);
    } else {
      HISPARSE_UNROLL
      for (int j = 0; j < kRun; ++j)
        if (first + j < p_.num_top_k) row[first + j] = locs.at[j];
    }
  }

  __device__ __forceinline__ int entries_per_thread() const {
    return kEntryTurns > 0 ? kEntryTurns : p_.entries_per_thread;
  }

  __device__ __forceinline__ int32_t* out_row() const {
    return settled(p_.top_k_device_locs + row_ * p_.device_locs_stride);
  }

  __device__ __forceinline__ Share run_of(int count, int per_thread, int stride) const {
    return {thread_ * per_thread, min_of(thread_ * per_thread + per_thread, count), stride};
  }

  const SwapInParams& p_;
  const int row_;
  const int thread_;
  const int threads_;
  const int32_t* const top_k_;
  uint32_t request_ = 0;
  const int32_t* locs_ = nullptr;
};

template <template <class> class Copy, class Layout, class Selection, int kSlotsPerThread>
__device__ __forceinline__ void swap_in(const SwapInParams& params) {
  SwapIn<Copy, Layout, Selection, kSlotsPerThread>(params).run();
}

}  // namespace hisparse::HISPARSE_TARGET
