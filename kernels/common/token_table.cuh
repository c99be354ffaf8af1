#pragma once

#include "four.cuh"
#include "swap_in_layout.h"

namespace hisparse::HISPARSE_TARGET {

// A hash table of the tokens of one row in shared memory: open addressing in buckets of four cells, which one
// 16-byte load looks at. A cell number stands for a token from then on.
class TokenTable {
 public:
  static constexpr int32_t kEmpty = INT32_MIN;
  static constexpr int32_t kNone = -1;  // no cell
  static constexpr uint32_t kBucket = SwapInLayout::kBucket;

  __device__ __forceinline__ TokenTable(int32_t* keys, int bits)
      : keys_(keys), mask_((1u << bits) - 1), shift_(32 - bits) {}

  // The cells of some tokens >= 0, which take free ones where they are new; only for those `waiting`, which
  // is used up. A token says at which cell of its bucket to start, so that most find it free. Several
  // together take as many rounds as the longest, not as all of them.
  template <int kCount>
  __device__ __forceinline__ void insert(const int32_t (&tokens)[kCount], bool (&waiting)[kCount],
                                         int32_t (&cells)[kCount]) const {
    HISPARSE_UNROLL
    for (int i = 0; i < kCount; ++i)
      if (waiting[i]) cells[i] = static_cast<int32_t>(hash(tokens[i]));
    bool any_waits = true;
    for (uint32_t step = 1; any_waits; ++step) {
      any_waits = false;
      HISPARSE_UNROLL
      for (int i = 0; i < kCount; ++i) {
        if (!waiting[i]) continue;
        const int32_t seen = shared_compare_and_swap(keys_ + cells[i], kEmpty, tokens[i]);
        waiting[i] = seen != kEmpty && seen != tokens[i];
        if (waiting[i]) cells[i] = static_cast<int32_t>(next_cell(hash(tokens[i]), step));
        any_waits |= waiting[i];
      }
    }
  }

  // The cells of four tokens, kNone for those that are not in the table. Not to run beside insert.
  __device__ __forceinline__ Four<int32_t> find(Four<int32_t> tokens) const {
    uint32_t buckets[4];
    Four<int32_t> keys[4];
    HISPARSE_UNROLL
    for (int j = 0; j < 4; ++j) {
      if (tokens.at[j] < kNone) tokens.at[j] = kNone;  // what an empty slot holds is no key
      buckets[j] = hash(tokens.at[j]) & ~(kBucket - 1);
      keys[j] = get_four(keys_ + buckets[j]);
    }
    Four<int32_t> cells;
    bool is_open = false;
    HISPARSE_UNROLL
    for (int j = 0; j < 4; ++j) {
      cells.at[j] = match(keys[j], buckets[j], tokens.at[j]);
      is_open |= cells.at[j] < 0 && is_full(keys[j]);
    }
    if (is_open) {
      HISPARSE_UNROLL
      for (int j = 0; j < 4; ++j) {
        // A full bucket may have sent the token on to the next one.
        while (cells.at[j] < 0 && is_full(keys[j])) {
          buckets[j] = (buckets[j] + kBucket) & mask_;
          keys[j] = get_four(keys_ + buckets[j]);
          cells.at[j] = match(keys[j], buckets[j], tokens.at[j]);
        }
      }
    }
    return cells;
  }

 private:
  __device__ __forceinline__ static bool is_full(const Four<int32_t>& keys) {
    return (keys.at[0] | keys.at[1] | keys.at[2] | keys.at[3]) >= 0;  // only a free cell is negative
  }

  __device__ __forceinline__ static int32_t match(const Four<int32_t>& keys, uint32_t bucket, int32_t token) {
    int32_t cell = kNone;
    HISPARSE_UNROLL
    for (int i = 0; i < 4; ++i)
      if (keys.at[i] == token) cell = static_cast<int32_t>(bucket) + i;
    return cell;
  }

  // First the rest of the bucket, then the buckets that follow.
  __device__ __forceinline__ uint32_t next_cell(uint32_t start, uint32_t step) const {
    return ((start + (step & ~(kBucket - 1))) & mask_) ^ (step & (kBucket - 1));
  }

  __device__ __forceinline__ uint32_t hash(int32_t token) const {
    return (static_cast<uint32_t>(token) * 0x9E3779B1u) >> shift_;  // Fibonacci hashing
  }

  int32_t* const keys_;
  const uint32_t mask_;
  const int shift_;
};

}  // namespace hisparse::HISPARSE_TARGET
