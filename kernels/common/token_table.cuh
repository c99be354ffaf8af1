#pragma once

#include "four.cuh"
#include "swap_in_layout.h"

namespace hisparse::HISPARSE_TARGET {

// Says which entry of the row asks for a token, in shared memory. A cell names an entry; only that entry's
// token says whether the cell means anything, so cells need no clearing and no atomics: of several entries in
// one cell the last one stays. Where there are fewer cells than tokens, the others are chained to it.
class TokenTable {
 public:
  static constexpr int32_t kNone = -1;

  // All tokens are below `limit`.
  __device__ __forceinline__ TokenTable(unsigned char* shared, const SwapInLayout& at, int entries,
                                        uint32_t limit)
      : cells_(settled_shared(reinterpret_cast<uint16_t*>(shared + at.table))),
        tokens_(settled_shared(reinterpret_cast<int32_t*>(shared + at.tokens))),
        chains_(reinterpret_cast<int32_t*>(shared + at.chains)),
        last_entry_(entries - 1),
        limit_(limit),
        has_chains_(limit >= at.cells),
        // The upper half of the product is a hash of the token, or else the token.
        factor_(settled(has_chains_ ? 0x9E3779B1u : 2)),
        range_(settled(has_chains_ ? at.cells : 1u << 31)) {}

  // Three steps with a block barrier after each: every entry comes in; those with a token are chained, if
  // there are chains at all; then tokens can be looked up.
  template <int kCount>
  __device__ __forceinline__ void put(int entry, const Neighbours<int32_t, kCount>& tokens) const {
    put_neighbours(tokens_ + entry, tokens);
    if (has_chains_) {
      Neighbours<int32_t, kCount> ends;
      HISPARSE_UNROLL
      for (int i = 0; i < kCount; ++i) ends.at[i] = kNone;
      put_neighbours(chains_ + entry, ends);
    }
    HISPARSE_UNROLL
    for (int i = 0; i < kCount; ++i)
      if (tokens.at[i] >= 0)
        shared_store_any(cells_ + cell_of(tokens.at[i]), static_cast<uint16_t>(entry + i));
  }
  __device__ __forceinline__ bool has_chains() const { return has_chains_; }
  __device__ __forceinline__ void chain(int entry, int32_t token) const {
    const int first = cells_[cell_of(token)];
    if (tokens_[first] != token) chains_[entry] = shared_exchange(chains_ + first, entry);
  }

  // Which entry stands for all with the token of this one.
  __device__ __forceinline__ int find_own(int32_t token) const {
    int entry = cells_[cell_of(token)];
    if (has_chains_) entry = follow(entry, token);
    return entry;
  }

  // The entries that stand for four tokens, kNone for those that no entry asks for. Any number may come.
  __device__ __forceinline__ Four<int32_t> find(const Four<int32_t>& tokens) const {
    uint32_t wanted[4];
    int32_t seen[4];
    Four<int32_t> entries;
    HISPARSE_UNROLL
    for (int j = 0; j < 4; ++j) {
      // No entry has the limit for its token.
      wanted[j] = static_cast<uint32_t>(tokens.at[j]) < limit_ ? static_cast<uint32_t>(tokens.at[j]) : limit_;
      entries.at[j] = cells_[cell_of(wanted[j])];
    }
    HISPARSE_UNROLL
    for (int j = 0; j < 4; ++j) {
      // Nobody knows what a cell holds that no entry wrote.
      if (entries.at[j] > last_entry_) entries.at[j] = last_entry_;
      seen[j] = tokens_[entries.at[j]];
    }
    if (has_chains_) {
      HISPARSE_UNROLL
      for (int j = 0; j < 4; ++j) entries.at[j] = follow(entries.at[j], static_cast<int32_t>(wanted[j]));
    } else {
      HISPARSE_UNROLL
      for (int j = 0; j < 4; ++j)
        if (seen[j] != static_cast<int32_t>(wanted[j])) entries.at[j] = kNone;
    }
    return entries;
  }

  __device__ __forceinline__ int32_t token_of(int entry) const { return tokens_[entry]; }

 private:
  __device__ __forceinline__ uint32_t cell_of(uint32_t token) const {
    return multiply_high(token * factor_, range_);
  }

  __device__ __forceinline__ int32_t follow(int32_t entry, int32_t token) const {
    while (entry != kNone && tokens_[entry] != token) entry = chains_[entry];
    return entry;
  }

  uint16_t* const cells_;
  int32_t* const tokens_;
  int32_t* const chains_;
  const int32_t last_entry_;
  const uint32_t limit_;
  const bool has_chains_;
  const uint32_t factor_;
  const uint32_t range_;
};

}  // namespace hisparse::HISPARSE_TARGET
