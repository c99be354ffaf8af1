// The copy of a tile on the NVIDIA targets: its parts are one run of equal words, dealt out to a warp.
#pragma once

#include "copy_part.cuh"
#include "params.h"

namespace hisparse::HISPARSE_TARGET {

// Six loads of 16 bytes per thread: a full block then has 96 KiB in flight, more than one multiprocessor can
// have outstanding, so that it stays busy while some of its warps wait for indices or store.
template <class Items>
class TileCopy {
 public:
  static constexpr bool kCopiesOnePart = true;
  using OnePart = PartCopy;

  __device__ __forceinline__ TileCopy(const Items& items, int32_t count, const TileShape& shape)
      : items_(items), count_(count), shape_(shape) {}

  __device__ __forceinline__ void start(int32_t lane, int32_t) { lane_ = lane; }

  // All lanes of a warp together.
  __device__ __forceinline__ void finish() const {
    if constexpr (!kHasTail) {
      if (count_ == 1) {
        const unsigned char* src;
        unsigned char* dst;
        if (!items_.locate(0, 0, src, dst)) return;
        OnePart one(src, dst, lane_, shape_.part_bytes);
        one.start();
        return one.finish();
      }
    }
    Word<8> tail{};
    if constexpr (kHasTail) {  // each lane that of one part, in flight with the words
      const unsigned char* src = nullptr;
      unsigned char* dst;
      const bool is_there = locate_tail(src, dst);
      load_streaming(tail, src, is_there);
    }
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
    if constexpr (kHasTail) {
      const unsigned char* src;
      unsigned char* dst = nullptr;
      const bool is_there = locate_tail(src, dst);  // again: kept, the address would take a load's registers
      store_cached(dst, tail, is_there);
    }
  }

 private:
  static constexpr bool kHasTail = Items::kTailAt != kNoTail;  // 8 bytes that lie apart
  static constexpr int kInFlight = kHasTail ? 5 : 6;           // a tail takes registers too
  static constexpr int kFew = kHasTail ? 3 : 4;

  __device__ __forceinline__ bool locate_tail(const unsigned char*& src, unsigned char*& dst) const {
    return lane_ < count_ && items_.locate(lane_, Items::kTailAt, src, dst);
  }

  template <int kBytes>
  __device__ __forceinline__ void run(const CopyShape& shape) const {
    Place place{0, lane_ * kBytes};
    if (shape.words_per_item < kWarpSize) {
      place.part = lane_ / shape.words_per_item;
      place.at = lane_ % shape.words_per_item * kBytes;
    }
    // What is left of a tile takes fewer instructions where it is few words: their issue is most of what a
    // copy of few items waits for.
    int32_t steps = (count_ * shape.words_per_item + kWarpSize - 1) / kWarpSize;
    // Two rounds of few words rather than one of many and a rest.
    HISPARSE_NO_UNROLL
    for (; steps > 2 * kFew || (steps > kFew && steps <= kInFlight); steps -= kInFlight)
      copy_words<kBytes, kInFlight>(place, shape);
    HISPARSE_NO_UNROLL
    for (; steps > 0; steps -= kFew) copy_words<kBytes, kFew>(place, shape);
  }

  struct Place {
    int32_t part, at;
  };

  // The next kCount words of every lane.
  template <int kBytes, int kCount>
  __device__ __forceinline__ void copy_words(Place& place, const CopyShape& shape) const {
    const int32_t end = shape.words_per_item * kBytes;
    // Emptied, so that no word counts as kept from one step to the next where its load is masked.
    Word<kBytes> words[kCount]{};
    unsigned char* dst[kCount];
    bool live[kCount];
    HISPARSE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const unsigned char* src;
      const bool is_inside = place.part < count_;
      live[i] = items_.locate(is_inside ? place.part : 0, place.at, src, dst[i]) && is_inside;
      load_streaming(words[i], src, live[i]);
      place.part += shape.item_step;
      place.at += shape.word_step * kBytes;
      if (place.at >= end) {
        place.at -= end;
        ++place.part;
      }
    }
    HISPARSE_UNROLL
    for (int i = 0; i < kCount; ++i) store_cached(dst[i], words[i], live[i]);
  }

  const Items& items_;
  const int32_t count_;
  const TileShape& shape_;
  int32_t lane_ = 0;
};

}  // namespace hisparse::HISPARSE_TARGET
