// The item copy of the AMD targets: one wavefront moves one item.
#pragma once

#include "copy_variants.cuh"
#include "params.h"

namespace hisparse::HISPARSE_TARGET {

// Per lane and step: 16 bytes where source and destination are 16-byte aligned and the item fills a whole
// wavefront of them, 8 bytes for the rest, single bytes for the last 7. Below the gate of kWarpSize * 16
// bytes, 16 bytes per lane would keep fewer lanes busy for the same number of steps: 14-22 % slower for 512 B
// at wave64 on MI355X.
//
// A wavefront loads one round of kItems items before it stores the first: one step of 16 bytes, two of 8,
// which cover as much, and the bytes. So an item of up to a round, remainder included, exposes one host round
// trip.
template <class Items, class Variant = Shipped>
class WaveCopy {
 public:
  static constexpr bool kCopiesOnePart = false;
  using Index = typename Items::Index;

  __device__ __forceinline__ WaveCopy(const Items& items, Index count, const CopyShape& shape)
      : WaveCopy(items, count, shape.item_bytes, shape.widest_word) {}
  __device__ __forceinline__ WaveCopy(const Items& items, Index count, const TileShape& shape)
      : WaveCopy(items, count, shape.part_bytes, 16) {}

  // Has nothing in flight yet when it returns.
  __device__ __forceinline__ void start(int32_t worker, int32_t workers) {
    lane_ = worker % kWarpSize;
    first_ = warp_uniform(worker / kWarpSize);
    waves_ = workers / kWarpSize;
  }

  __device__ __forceinline__ void finish() {
    for (Index item = first_; item < count_; item += kItems * static_cast<Index>(waves_)) {
      const unsigned char* src[kItems];
      unsigned char* dst[kItems];
      bool live[kItems];
      HISPARSE_UNROLL
      for (int i = 0; i < kItems; ++i) {
        const Index index = item + i * static_cast<Index>(waves_);
        src[i] = dst[i] = nullptr;
        live[i] = index < count_ && items_.locate(index, 0, src[i], dst[i]);
      }
      Item batch[kItems];
      int32_t end = 1;
      HISPARSE_UNROLL
      for (int i = 0; i < kItems; ++i) {
        batch[i] = describe(src[i], dst[i], live[i]);
        if constexpr (kHasTail) find_tail(item + i * static_cast<Index>(waves_), batch[i]);
        const int32_t item_end = batch[i].wide_end > 0 ? batch[i].wide_end : batch[i].bytes;
        if (item_end > end) end = item_end;
      }
      for (int32_t at = 0; at < end; at += kRound) {
        Round rounds[kItems];
        HISPARSE_UNROLL
        for (int i = 0; i < kItems; ++i) rounds[i].before_loads();
        HISPARSE_UNROLL
        for (int i = 0; i < kItems; ++i) load(batch[i], at, rounds[i]);
        HISPARSE_UNROLL
        for (int i = 0; i < kItems; ++i) rounds[i].after_loads();
        // Conditions are computed again: kept, they would take more scalar registers than there are.
        after_load(lane_);
        HISPARSE_UNROLL
        for (int i = 0; i < kItems; ++i) store(batch[i], at, rounds[i]);
      }
    }
  }

 private:
  __device__ __forceinline__ WaveCopy(const Items& items, Index count, int32_t item_bytes,
                                      int32_t widest_word)
      : items_(items),
        count_(count),
        item_bytes_(item_bytes),
        words_end_(item_bytes & ~7),
        wide_end_(widest_word < 16 ? 0 : item_bytes - item_bytes % (Variant::kIsGated ? kRound : 16)) {}

  static constexpr int kItems = 4;
  static constexpr bool kHasTail = Items::kTailAt != kNoTail;
  static constexpr int32_t kRound = kWarpSize * 16;
  static constexpr int32_t kNarrowStep = kWarpSize * 8;

  struct Item {
    const unsigned char* src;
    unsigned char* dst;
    int32_t bytes;                     // 0: nothing to copy
    int32_t wide_end;                  // how far the 16-byte steps go
    int32_t src_gap = 0, dst_gap = 0;  // so much further on the tail lies
  };

  struct Round {
    Word<16> wide;
    uint64_t narrow[2];
    uint32_t byte;

    __device__ __forceinline__ void before_loads() {
      before_load(wide);
      before_load(narrow[0]);
      before_load(narrow[1]);
      before_load(byte);
    }
    __device__ __forceinline__ void after_loads() {
      after_load(wide);
      after_load(narrow[0]);
      after_load(narrow[1]);
      after_load(byte);
    }
  };

  __device__ __forceinline__ Item describe(const unsigned char* src, unsigned char* dst, bool live) const {
    // The destination stays in vector registers: with it, gfx9 would spill scalar ones.
    src = warp_uniform(src);
    const auto bits =
        static_cast<int32_t>(reinterpret_cast<uintptr_t>(src) | reinterpret_cast<uintptr_t>(dst));
    const bool aligned = (warp_uniform(bits) & 15) == 0;
    return {src, dst, live ? item_bytes_ : 0, live && aligned ? wide_end_ : 0, 0, 0};
  }

  __device__ __forceinline__ void find_tail(Index index, Item& item) const {
    if (item.bytes == 0) return;
    const unsigned char* src;
    unsigned char* dst;
    items_.locate(index, Items::kTailAt, src, dst);
    item.src_gap = warp_uniform(static_cast<int32_t>(src - item.src)) - Items::kTailAt;
    item.dst_gap = static_cast<int32_t>(dst - item.dst) - Items::kTailAt;
  }

  __device__ __forceinline__ static int32_t gap_at(int32_t at, int32_t gap) {
    return kHasTail && at >= Items::kTailAt ? gap : 0;
  }

  __device__ __forceinline__ int32_t wide_at(int32_t at) const { return at + lane_ * 16; }
  // A gated step fills the wavefront.
  __device__ __forceinline__ bool is_wide(const Item& item, int32_t at) const {
    return (Variant::kIsGated ? at : wide_at(at)) < item.wide_end;
  }
  __device__ __forceinline__ int32_t narrow_at(const Item& item, int32_t at, int step) const {
    return item.wide_end + at + step * kNarrowStep + lane_ * 8;
  }
  __device__ __forceinline__ int32_t words_end(const Item& item) const {
    return item.bytes > 0 ? words_end_ : 0;
  }

  __device__ __forceinline__ void load(const Item& item, int32_t at, Round& round) const {
    if (is_wide(item, at)) load_as<Variant>(round.wide, item.src + wide_at(at), true);
    HISPARSE_UNROLL
    for (int step = 0; step < 2; ++step)
      if (const int32_t from = narrow_at(item, at, step); from < words_end(item))
        round.narrow[step] = load_unaligned(item.src + from + gap_at(from, item.src_gap));
    if (at == 0 && words_end_ + lane_ < item.bytes) round.byte = load_byte(item.src + words_end_ + lane_);
  }

  __device__ __forceinline__ void store(const Item& item, int32_t at, const Round& round) const {
    if (is_wide(item, at)) store_cached(item.dst + wide_at(at), round.wide, true);
    HISPARSE_UNROLL
    for (int step = 0; step < 2; ++step)
      if (const int32_t to = narrow_at(item, at, step); to < words_end(item))
        store_unaligned(item.dst + to + gap_at(to, item.dst_gap), round.narrow[step]);
    if (at == 0 && words_end_ + lane_ < item.bytes)
      store_byte(item.dst + words_end_ + lane_, static_cast<unsigned char>(round.byte));
  }

  const Items& items_;
  const Index count_;
  const int32_t item_bytes_;
  const int32_t words_end_;
  const int32_t wide_end_;  // of an aligned item
  int32_t lane_ = 0;
  int32_t first_ = 0;
  int32_t waves_ = 0;
};

}  // namespace hisparse::HISPARSE_TARGET
