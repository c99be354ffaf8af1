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
  static constexpr int32_t kBucket = SwapInLayout::kBucket;

  __device__ __forceinline__ TokenTable(int32_t* keys, int bits)
      : keys_(keys), mask_((1 << bits) - 1), shift_(32 - bits) {}

  // Puts tokens >= 0 at or after the cells that first_cell names, and says where, and whether they were new
  // there. A thread with fewer brings others, with cells that are its own; the whole warp goes on until all
  // have found their place, so that no branch diverges.
  template <int kCount>
  __device__ __forceinline__ void insert(const int32_t (&tokens)[kCount], int32_t (&cells)[kCount],
                                         bool (&are_new)[kCount]) const {
    HISPARSE_UNROLL
    for (int i = 0; i < kCount; ++i) are_new[i] = false;
    bool waits = true;
    for (int32_t step = 1; waits; ++step) {
      // First the rest of the bucket, then the buckets that follow.
      const int32_t within_bucket = (step ^ (step - 1)) & (kBucket - 1);
      const bool leaves_bucket = step % kBucket == 0;
      waits = false;
      HISPARSE_UNROLL
      for (int i = 0; i < kCount; ++i) {
        // Once a token is in, this changes nothing.
        const int32_t seen = shared_compare_and_swap(keys_ + cells[i], kEmpty, tokens[i]);
        are_new[i] |= seen == kEmpty;
        if (seen == kEmpty || seen == tokens[i]) continue;
        waits = true;
        const int32_t next_bucket = ((cells[i] ^ within_bucket) + kBucket) & mask_;
        cells[i] = leaves_bucket ? next_bucket : cells[i] ^ within_bucket;
      }
      waits = warp_any(waits);
    }
  }

  // The token says at which cell of its bucket to start, so that most find it free.
  __device__ __forceinline__ int32_t first_cell(int32_t token) const {
    return static_cast<int32_t>(hash(token, shift_));
  }

  // The cells of four tokens, kNone for those that are not in the table. Not to run beside insert.
  __device__ __forceinline__ Four<int32_t> find(Four<int32_t> tokens) const {
    int32_t buckets[4];
    Four<int32_t> keys[4];
    HISPARSE_UNROLL
    for (int j = 0; j < 4; ++j) {
      if (tokens.at[j] < kNone) tokens.at[j] = kNone;  // what an empty slot holds is no key
      buckets[j] = static_cast<int32_t>(hash(tokens.at[j], shift_ + 2));
      keys[j] = get_four(keys_ + buckets[j] * kBucket);
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
          buckets[j] = (buckets[j] + 1) & mask_ / kBucket;
          keys[j] = get_four(keys_ + buckets[j] * kBucket);
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

  __device__ __forceinline__ static int32_t match(const Four<int32_t>& keys, int32_t bucket, int32_t token) {
    int32_t cell = kNone;
    HISPARSE_UNROLL
    for (int i = 0; i < 4; ++i)
      if (keys.at[i] == token) cell = bucket * kBucket + i;
    return cell;
  }

  __device__ __forceinline__ static uint32_t hash(int32_t token, int shift) {
    return (static_cast<uint32_t>(token) * 0x9E3779B1u) >> shift;  // Fibonacci hashing
  }

  int32_t* const keys_;
  const int32_t mask_;
  const int shift_;
};

}  // namespace hisparse::HISPARSE_TARGET
