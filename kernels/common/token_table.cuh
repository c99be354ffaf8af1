#pragma once

#include "four.cuh"

namespace hisparse::HISPARSE_TARGET {

// A hash table of the tokens of one row in shared memory: open addressing in buckets of four cells, which one 16-byte
// load looks at. A cell number stands for a token from then on.
class TokenTable {
 public:
  static constexpr int32_t kEmpty = INT32_MIN;
  static constexpr int32_t kNone = -1;  // no cell
  static constexpr uint32_t kBucket = SwapInLayout::kBucket;

  __device__ __forceinline__ TokenTable(int32_t* keys, int bits)
      : keys_(keys), mask_((1u << bits) - 1), shift_(32 - bits) {}

  // The cell of `token` >= 0, which takes a free one where it is new. The token says at which cell of its bucket to
  // start, so that most find it free.
  __device__ __forceinline__ int32_t insert(int32_t token) const {
    const uint32_t start = hash(token);
    uint32_t cell = start;
    for (uint32_t step = 0;;) {
      const int32_t seen = shared_compare_and_swap(keys_ + cell, kEmpty, token);
      if (seen == kEmpty || seen == token) return static_cast<int32_t>(cell);
      ++step;
      cell = ((start + (step & ~(kBucket - 1))) & mask_) ^ (step & (kBucket - 1));
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

  __device__ __forceinline__ uint32_t hash(int32_t token) const {
    return (static_cast<uint32_t>(token) * 0x9E3779B1u) >> shift_;  // Fibonacci hashing
  }

  int32_t* const keys_;
  const uint32_t mask_;
  const int shift_;
};

}  // namespace hisparse::HISPARSE_TARGET
