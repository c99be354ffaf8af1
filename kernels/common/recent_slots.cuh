// Four slots of an LRU row: as they are loaded, and as a thread keeps them.
#pragma once

#include "four.cuh"

namespace hisparse::HISPARSE_TARGET {

// Four slots that follow each other in LRU order, and which of them were hit.
struct RecentSlots {
  uint32_t pairs[2]{};  // uint16 each
  uint32_t hits = 0;    // a bit each

  RecentSlots() = default;
  __device__ __forceinline__ explicit RecentSlots(const Four<uint16_t>& stored) {
    HISPARSE_UNROLL
    for (int j = 0; j < 4; ++j) {
      pairs[j / 2] |= (stored.at[j] & 0x7FFFu) << j % 2 * 16;
      hits |= static_cast<uint32_t>(stored.at[j] >> 15) << j;
    }
  }
  __device__ __forceinline__ explicit operator Four<uint16_t>() const {
    Four<uint16_t> stored;
    HISPARSE_UNROLL
    for (int j = 0; j < 4; ++j) stored.at[j] = static_cast<uint16_t>(slot(j) | (hits >> j & 1) << 15);
    return stored;
  }
  __device__ __forceinline__ int32_t slot(int j) const {
    return static_cast<int32_t>(j % 2 ? pairs[j / 2] >> 16 : pairs[j / 2] & 0xFFFF);
  }
  __device__ __forceinline__ bool is_hit(int j) const { return hits >> j & 1; }
};

// The same as they were loaded. To put them together at once would wait for the load.
struct RawSlots {
  uint32_t words[4];

  // Slots past the end are none.
  __device__ __forceinline__ static RawSlots load(const int16_t* row, int first, int end, bool aligned) {
    RawSlots raw;
    if (aligned) {
      const auto pairs = get_neighbours<2>(reinterpret_cast<const uint32_t*>(row + first));
      raw.words[0] = pairs.at[0];
      raw.words[1] = pairs.at[1];
    } else {
      HISPARSE_UNROLL
      for (int j = 0; j < 4; ++j)
        raw.words[j] = first + j < end ? static_cast<uint16_t>(row[first + j]) : 0xFFFF;
    }
    return raw;
  }

  // What is no slot becomes `no_slot`, which is above all of them.
  __device__ __forceinline__ RecentSlots unpacked(bool aligned, uint32_t no_slot) const {
    RecentSlots four;
    HISPARSE_UNROLL
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t both = aligned ? words[pair] : words[pair * 2] | words[pair * 2 + 1] << 16;
      four.pairs[pair] = min_of_halves(both, no_slot | no_slot << 16);
    }
    return four;
  }
};

}  // namespace hisparse::HISPARSE_TARGET
