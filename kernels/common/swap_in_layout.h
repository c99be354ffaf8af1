// Where the swap-in kernel keeps things in a block's shared memory. The host sizes the launch with the same
// struct that the kernel addresses with.
#pragma once

#include <cstdint>

namespace hisparse {

struct SwapInLayout {
  // Byte offsets. (*) used where a thread's share does not stay in registers.
  uint32_t keys;  // int32 [cells]: the token table. Once the slots are resolved: int64 [num_top_k], host locs
                  // of the misses
  uint32_t
      places;    // int32 [cells + 2]: per cell the slot, or the first place in the row of a token that missed
  uint32_t lru;  // uint16 [hot_buffer_size]: the LRU row, bit 15 set on slots that were hit (*)
  uint32_t hits;  // uint8 [hot_buffer_size]: flags per slot. Once folded into lru: int32 [num_top_k], victim
                  // slots, then device locs of the misses
  uint32_t entry_cells;  // uint16 [num_top_k]: the cell of each entry (*)
  uint32_t is_miss;  // bool [num_top_k]: entries that are the first place of a token that is not resident (*)
  uint32_t scratch;  // uint32 [kScratchWords]
  uint32_t bytes;

  static constexpr int kBucket = 4;  // cells that one 16-byte load looks at
  static constexpr uint32_t kScratchWords =
      40;  // 32 warp totals, then a few words that one thread tells the others
  static constexpr int kMaxTableBits = 15;  // entry_cells holds cells + 2 values in 16 bits

  // The smallest table that leaves at least one cell free, so that every probe ends.
  static constexpr int min_table_bits(int32_t num_top_k) {
    int bits = 4;
    while ((int64_t{1} << bits) <= num_top_k) ++bits;
    return bits;
  }

  static constexpr SwapInLayout make(int32_t num_top_k, int32_t hot_buffer_size, int table_bits) {
    const uint32_t cells = 1u << table_bits;
    const uint32_t k = static_cast<uint32_t>(num_top_k), h = static_cast<uint32_t>(hot_buffer_size);
    SwapInLayout at{};
    at.keys = 0;
    at.places = at.keys + padded(cells * 4 > k * 8 ? cells * 4 : k * 8);
    at.lru = at.places + padded((cells + 2) * 4);
    at.hits = at.lru + padded(h * 2);
    at.entry_cells = at.hits + padded(h > k * 4 ? h : k * 4);
    at.is_miss = at.entry_cells + padded(k * 2);
    at.scratch = at.is_miss + padded(k);
    at.bytes = at.scratch + padded(kScratchWords * 4);
    return at;
  }

 private:
  static constexpr uint32_t padded(uint32_t bytes) { return (bytes + 15u) & ~15u; }
};

}  // namespace hisparse
