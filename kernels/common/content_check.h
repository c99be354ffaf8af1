// What the check of contents looks for, and the parameters of its kernels.
#pragma once

#include <cstdint>

#include "params.h"

namespace hisparse {

// In the order in which they are reported.
enum class Fault : int32_t {
  kRequest,          // req_pool_indices: no row of the tables
  kRepeatedRequest,  // req_pool_indices: two real rows of one request
  kToken,            // top_k_tokens: no position of the sequence, or one without a host loc
  kDeviceLoc,        // device_buffer_locs: no row of device_buffer
  kSlotToken,        // device_buffer_tokens: neither -1 nor a position
  kRepeatedToken,    // device_buffer_tokens: a token in several slots
  kLruSlot,          // lru_slots: no slot
  kRepeatedLruSlot,  // lru_slots: a slot that stands there twice
  kHostLoc,          // host_cache_locs: no row of host_cache, of a token that is asked for
  kSourceIndex,      // src_indices, dst_indices: past the end of the pool
  kDestinationIndex,
  kCount
};
inline constexpr int kFaults = static_cast<int>(Fault::kCount);

// Where the first fault of a kind is: row << 32 | column, all ones where there is none.
inline constexpr uint64_t kNoFault = ~uint64_t{0};

struct SwapInCheckParams {
  SwapInParams call;
  uint64_t* first_faults;  // [kFaults]
  int32_t bitmap_words;    // shared memory holds two bitmaps of so many words
};

struct IndexCheckParams {
  const int64_t* indices[2];  // of the source and of the destination
  int64_t rows[2];            // of the pools
  int64_t count;
  uint64_t* first_faults;
};

}  // namespace hisparse
