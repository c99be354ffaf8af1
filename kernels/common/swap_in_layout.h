// Where the swap-in kernel keeps things in a block's shared memory. The host sizes the launch with the same
// struct that the kernel addresses with.
#pragma once

#include <cstdint>

namespace hisparse {

struct SwapInLayout {
  // Byte offsets. What stands first in a line is dead by the time that the second is written.
  uint32_t keys;     // int32 [cells], the token table; then int64 [num_top_k], the host locs of the misses
  uint32_t places;   // int32 [cells + 2]: where the token of a cell is
  uint32_t hits;     // uint8 [hot_buffer_size], flags; then int32 [num_top_k], the device locs of the misses
  uint32_t victims;  // uint16 [num_top_k]: the slots that the misses take
  uint32_t scratch;  // uint32 [kScratchWords]
  uint32_t lru;  // uint16 [hot_buffer_size]: the LRU row as loaded (bit 15: hit) if staged, else the new one
  uint32_t entry_cells;  // uint16 [num_top_k]: the cell of each entry; bit 15: its first place, and a miss.
                         // If staged
  uint32_t bytes;

  static constexpr int kBucket = 4;  // cells that one 16-byte load looks at
  static constexpr uint32_t kScratchWords =
      36;                                   // 32 warp totals, then a few words of one thread for the others
  static constexpr int kMaxTableBits = 14;  // cells + 2 numbers fit beside a flag in 16 bits

  // The smallest table that leaves at least one cell free, so that every probe ends.
  static constexpr int min_table_bits(int32_t num_top_k) {
    int bits = 4;
    while ((int64_t{1} << bits) <= num_top_k) ++bits;
    return bits;
  }

  // `staged`: a thread's share of the row does not stay in registers.
  static constexpr SwapInLayout make(int32_t num_top_k, int32_t hot_buffer_size, int table_bits,
                                     bool staged) {
    const uint32_t cells = 1u << table_bits;
    const uint32_t k = static_cast<uint32_t>(num_top_k), h = static_cast<uint32_t>(hot_buffer_size);
    SwapInLayout at{};
    at.keys = 0;
    at.places = at.keys + padded(cells * 4 > k * 8 ? cells * 4 : k * 8);
    at.hits = at.places + padded((cells + 2) * 4);
    at.victims = at.hits + padded(h > k * 4 ? h : k * 4);
    at.scratch = at.victims + padded(k * 2);
    at.lru = at.scratch + padded(kScratchWords * 4);
    at.entry_cells = at.lru + padded(h * 2);
    at.bytes = at.entry_cells + (staged ? padded(k * 2) : 0);
    return at;
  }

 private:
  static constexpr uint32_t padded(uint32_t bytes) { return (bytes + 15u) & ~15u; }
};

}  // namespace hisparse
