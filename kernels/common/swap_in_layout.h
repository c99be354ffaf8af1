// Where the swap-in kernel keeps things in a block's shared memory. The host sizes the launch with the same
// struct that the kernel addresses with.
#pragma once

#include <cstdint>

namespace hisparse {

struct SwapInLayout {
  // Byte offsets. What stands first in a line is dead by the time that the second is written.
  uint32_t tokens;   // int32 [places_end]: the token of each entry
  uint32_t places;   // int32 [places_end + 2]: where the token of an entry is
  uint32_t victims;  // uint16 [num_top_k]: the slots that the misses take
  uint32_t hits;  // uint8 [hot_buffer_size + 4], flags; then int32 [num_top_k], the device locs of the misses
  uint32_t scratch;  // uint32 [kScratchWords]
  uint32_t chains;   // int32 [places_end]: the next entry whose token has the same cell
  uint32_t lru;  // uint16 [hot_buffer_size]: the LRU row as loaded (bit 15: hit) if staged, else the new one
  uint32_t entries;  // uint16 [num_top_k]: which entry stands for each entry; bit 15: a miss. If staged
  uint32_t locs;     // int32 [hot_buffer_size]: the device locs of the slots, if has_locs
  uint32_t table;    // uint16 [cells]: the token table; then int64 [num_top_k], the host locs of the misses
  uint32_t bytes;
  uint32_t places_end;  // num_top_k, or what all threads together look after
  uint32_t cells;
  uint32_t has_locs;

  static constexpr uint32_t kScratchWords = 33;  // 32 warp totals, then a word of one thread for the others
  static constexpr int32_t kMaxTopK = (1 << 15) - 2;  // with two more places they fit beside a flag

  // `entries_in_registers`: what all threads together look after, or 0 where a thread's share of the row does
  // not stay in registers and is staged. What is left of `available` bytes is spent on the locs, then on
  // cells up to `wanted_cells`.
  static constexpr SwapInLayout make(int32_t num_top_k, int32_t hot_buffer_size,
                                     uint32_t entries_in_registers, uint32_t available = 0,
                                     uint32_t wanted_cells = 0) {
    const uint32_t k = static_cast<uint32_t>(num_top_k), h = static_cast<uint32_t>(hot_buffer_size);
    const bool staged = entries_in_registers == 0;
    SwapInLayout at{};
    at.places_end = larger(k, entries_in_registers);
    const auto take = [&at](uint32_t bytes) {
      const uint32_t begin = at.bytes;
      at.bytes += padded(bytes);
      return begin;
    };
    at.tokens = take(at.places_end * 4);
    at.places = take((at.places_end + 2) * 4);
    at.hits = take(larger(h + 4, k * 4));
    at.scratch = take(kScratchWords * 4);
    // Up to three places behind the row are written to and not read. Victims are known, and a new LRU row is
    // put together, when the chains are done with.
    at.chains = take(staged ? k * 4 : larger((h + 3) * 2, at.places_end * 4));
    at.victims = staged ? at.chains : take(k * 2);
    at.lru = staged ? take(h * 2) : at.chains;
    at.entries = staged ? take(k * 2) : 0;

    const uint32_t least = padded(k * 8);
    at.has_locs = at.bytes + padded(h * 4) + least <= available;
    at.locs = at.has_locs ? take(h * 4) : 0;
    uint32_t table_bytes = at.bytes < available ? (available - at.bytes) & ~15u : 0;
    if (table_bytes > padded(wanted_cells * 2)) table_bytes = padded(wanted_cells * 2);
    at.table = take(larger(table_bytes, least));
    at.cells = (at.bytes - at.table) / 2;
    return at;
  }

 private:
  static constexpr uint32_t padded(uint32_t bytes) { return (bytes + 15u) & ~15u; }
  static constexpr uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
};

}  // namespace hisparse
