// The item copy of the NVIDIA targets: all items are one run of equal words, dealt out to the threads.
#pragma once

#include "copy_variants.cuh"
#include "params.h"

namespace hisparse::HISPARSE_TARGET {

// No lane idles at the end of an item: 576 B are 36 words of 16 B, and lanes 4..31 of the second step go on
// with the next item. The word size divides item size and pool addresses, so that no access is ever
// misaligned.
template <class Items, class Variant = Shipped>
class ChunkCopy {
 public:
  using Index = typename Items::Index;

  __device__ __forceinline__ ChunkCopy(const Items& items, Index count, const CopyShape& shape)
      : items_(items), count_(count), shape_(shape) {}

  // Issues the first loads. What the caller does between start and finish hides behind the first round trip.
  __device__ __forceinline__ void start(int32_t worker, int32_t workers) {
    workers_ = workers;
    tail_item_ = worker;
    // Few items leave most warps without a word: they skip the division.
    if (worker >= all_words()) {
      item_ = count_;
      return;
    }
    item_ = static_cast<uint32_t>(worker) / static_cast<uint32_t>(shape_.words_per_item);
    word_ = static_cast<uint32_t>(worker) % static_cast<uint32_t>(shape_.words_per_item);
    if (shape_.word_bytes == 16) load(first_);
  }

  __device__ __forceinline__ void finish() {
    if (shape_.word_bytes == 16) {
      const Tail tail = load_tail();
      if (item_ >= count_) {
        store(first_);
        store(tail);
        return;
      }
      const int each = words_per_round();
      Batch<16, kNextInFlight> next;
      load(next, each);
      store(first_);
      store(tail);
      store(next);
      run<16>(each);
    } else if (kHasTail || shape_.word_bytes == 8) {
      run<8>(kInFlight);
    } else if (shape_.word_bytes == 4) {
      run<4>(kInFlight);
    } else {
      run<1>(kInFlight);
    }
  }

 private:
  static constexpr bool kHasTail = Items::kTailAt != kNoTail;
  static constexpr int kInFlight = 5;
  // The first loads stay in registers while the caller works: more of them would spill in the swap-in.
  static constexpr int kFirstInFlight = 2;
  static constexpr int kNextInFlight = kHasTail ? 4 : kInFlight;  // beside the first, and the tail
  static constexpr int kFewestPerRound = 3;

  template <int kBytes, int kCount>
  struct Batch {
    Word<kBytes> words[kCount];
    unsigned char* dst[kCount];
    bool live[kCount];
  };
  // A tail of 8 bytes is copied apart from the words: loaded into the register of one of them, it would have
  // that word's load wait for it, at every word for which a lane of the warp has a tail.
  struct Tail {
    Word<8> word;
    Index item;  // its address is looked up again: kept, it would take a load's registers
  };

  // The loads are predicated, not branched around: in a prototype on H200 that made 14.4 us of 22.2.
  template <int kBytes, int kCount>
  __device__ __forceinline__ void load(Batch<kBytes, kCount>& batch, int each = kCount) {
    HISPARSE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const unsigned char* src = nullptr;
      batch.dst[i] = nullptr;
      batch.live[i] = i < each && item_ < count_ && items_.locate(item_, word_ * kBytes, src, batch.dst[i]);
      load_as<Variant>(batch.words[i], src, batch.live[i]);
      if (i < each) advance();
    }
  }

  // One in every round is enough: an item has more words than a thread loads in a round.
  __device__ __forceinline__ Tail load_tail() {
    Tail tail{};
    if constexpr (kHasTail) {
      const unsigned char* src = nullptr;
      unsigned char* dst;
      tail.item = tail_item_;
      const bool live = locate(tail, src, dst);
      load_as<Variant>(tail.word, src, live);
      tail_item_ += workers_;
    }
    return tail;
  }

  template <int kBytes, int kCount>
  __device__ __forceinline__ static void store(const Batch<kBytes, kCount>& batch) {
    HISPARSE_UNROLL
    for (int i = 0; i < kCount; ++i) store_cached(batch.dst[i], batch.words[i], batch.live[i]);
  }
  __device__ __forceinline__ bool locate(const Tail& tail, const unsigned char*& src,
                                         unsigned char*& dst) const {
    return tail.item < count_ && items_.locate(tail.item, Items::kTailAt, src, dst);
  }
  __device__ __forceinline__ void store(const Tail& tail) const {
    if constexpr (kHasTail) {
      const unsigned char* src;
      unsigned char* dst = nullptr;
      const bool live = locate(tail, src, dst);
      store_cached(dst, tail.word, live);
    }
  }

  template <int kBytes>
  __device__ __forceinline__ void run(int each) {
    while (item_ < count_) {
      Batch<kBytes, kInFlight> batch;
      const Tail tail = load_tail();
      load(batch, each);
      store(tail);
      store(batch);
    }
  }

  // How many words a thread loads per round: as many as leave the last round fullest. A call took up to 1.3
  // us longer where that had less than a word per thread, 0.5 where it had less than two (H200).
  __device__ __forceinline__ int words_per_round() const {
    const int64_t words = all_words();
    if (words > INT32_MAX / 16) return kInFlight;
    const auto workers = static_cast<uint32_t>(workers_);
    const uint32_t left = (static_cast<uint32_t>(words) - kFirstInFlight * workers) * 16 / workers;
    int best = kInFlight;
    uint32_t fullest = 0;
    HISPARSE_UNROLL
    for (int each = kInFlight; each >= kFewestPerRound; --each) {
      const uint32_t not_in_next = each > kNextInFlight ? each - kNextInFlight : 0;
      const uint32_t in_last_round = (left + 16 * not_in_next - 1) % (16 * each);
      if (in_last_round > fullest) {
        fullest = in_last_round;
        best = each;
      }
    }
    return best;
  }

  __device__ __forceinline__ int64_t all_words() const {
    return static_cast<int64_t>(count_) * shape_.words_per_item;
  }

  __device__ __forceinline__ void advance() {
    item_ += shape_.item_step;
    word_ += shape_.word_step;
    if (word_ >= shape_.words_per_item) {
      word_ -= shape_.words_per_item;
      ++item_;
    }
  }

  const Items& items_;
  const Index count_;
  const CopyShape& shape_;
  Index item_ = 0;
  int32_t word_ = 0;
  Index tail_item_ = 0;
  int32_t workers_ = 1;
  Batch<16, kFirstInFlight> first_{};
};

}  // namespace hisparse::HISPARSE_TARGET
