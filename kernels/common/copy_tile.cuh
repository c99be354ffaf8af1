// The copy of a tile on the NVIDIA targets: its parts are one run of equal words, dealt out to a warp.
#pragma once

#include "params.h"

namespace hisparse::HISPARSE_TARGET {

// Six loads of 16 bytes per thread: a full block then has 96 KiB in flight, more than one multiprocessor can
// have outstanding, so that it stays busy while some of its warps wait for indices or store.
template <class Items>
class TileCopy {
 public:
  __device__ __forceinline__ TileCopy(const Items& items, int32_t count, const TileShape& shape)
      : items_(items), count_(count), shape_(shape) {}

  __device__ __forceinline__ void start(int32_t lane, int32_t) { lane_ = lane; }

  // All lanes of a warp together.
  __device__ __forceinline__ void finish() const {
    uint32_t bits = kHasTail ? 0 : static_cast<uint32_t>(shape_.part_bytes);
    if (lane_ < count_) {
      const unsigned char* src;
      unsigned char* dst;
      items_.locate(lane_, 0, src, dst);
      bits |= static_cast<uint32_t>(reinterpret_cast<uintptr_t>(src) | reinterpret_cast<uintptr_t>(dst));
    }
    if (!warp_any(bits & 15)) {
      run<16>(shape_.words[0]);
    } else if (kHasTail || !warp_any(bits & 7)) {
      run<8>(shape_.words[1]);
    } else if (!warp_any(bits & 3)) {
      run<4>(shape_.words[2]);
    } else {
      run<1>(shape_.words[3]);
    }
  }

 private:
  static constexpr bool kHasTail = Items::kTailAt != kNoTail;  // one word of 8 bytes, or half of one of 16
  static constexpr int kInFlight = kHasTail ? 4 : 6;           // a tail takes registers too

  template <int kBytes>
  __device__ __forceinline__ void run(const CopyShape& shape) const {
    int32_t part = 0, at = lane_ * kBytes;
    if (shape.words_per_item < kWarpSize) {
      part = lane_ / shape.words_per_item;
      at = lane_ % shape.words_per_item * kBytes;
    }
    const int32_t end = shape.words_per_item * kBytes;
    HISPARSE_NO_UNROLL
    while (warp_any(part < count_)) {
      // Emptied, so that no word counts as kept from one step to the next where its load is masked.
      Word<kBytes> words[kInFlight]{};
      unsigned char* dst[kInFlight];
      bool live[kInFlight];
      uint32_t halves = 0;
      HISPARSE_UNROLL
      for (int i = 0; i < kInFlight; ++i) {
        const unsigned char* src = nullptr;
        dst[i] = nullptr;
        live[i] = part < count_ && items_.locate(part, at, src, dst[i]);
        bool is_half = false;
        if constexpr (kHasTail && kBytes == 16) {
          is_half = at == Items::kTailAt;
          halves |= static_cast<uint32_t>(is_half) << i;
          load_before_stores_half(words[i], src, live[i] && is_half);
        }
        load_before_stores(words[i], src, live[i] && !is_half);
        part += shape.item_step;
        at += shape.word_step * kBytes;
        if (at >= end) {
          at -= end;
          ++part;
        }
      }
      HISPARSE_UNROLL
      for (int i = 0; i < kInFlight; ++i) {
        const bool is_half = kHasTail && kBytes == 16 && halves >> i & 1;
        store_cached(dst[i], words[i], live[i] && !is_half);
        if constexpr (kHasTail && kBytes == 16) store_cached_half(dst[i], words[i], live[i] && is_half);
      }
    }
  }

  const Items& items_;
  const int32_t count_;
  const TileShape& shape_;
  int32_t lane_ = 0;
};

}  // namespace hisparse::HISPARSE_TARGET
