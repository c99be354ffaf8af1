// The copy of one part by a warp on the NVIDIA targets: the distances of its words are known when the kernel
// is compiled.
#pragma once

#include "params.h"

namespace hisparse::HISPARSE_TARGET {

class PartCopy {
 public:
  // `dst` is null where there is nothing to copy.
  __device__ __forceinline__ PartCopy(const unsigned char* src, unsigned char* dst, int32_t lane,
                                      int32_t part_bytes) {
    const uint32_t bits =
        16 | static_cast<uint32_t>(part_bytes) |
        static_cast<uint32_t>(reinterpret_cast<uintptr_t>(src) | reinterpret_cast<uintptr_t>(dst));
    word_bytes_ = static_cast<int32_t>(bits & (0u - bits));
    if (word_bytes_ == 2) word_bytes_ = 1;
    const int32_t at = lane * word_bytes_;
    src_ = src + at;
    dst_ = dst + at;
    left_ = dst == nullptr ? 0 : part_bytes - at;
  }

  // Issues the first loads of 16 bytes. What the caller does between start and finish hides behind them.
  __device__ __forceinline__ void start() { load(first_, word_bytes_ == 16 ? left_ : 0); }

  __device__ __forceinline__ void finish() {
    if (word_bytes_ == 16) {
      go_on(first_);
    } else if (word_bytes_ == 8) {
      run<8>();
    } else if (word_bytes_ == 4) {
      run<4>();
    } else {
      run<1>();
    }
  }

 private:
  static constexpr int kInFlight = kPartLoads;

  template <int kBytes>
  __device__ __forceinline__ void run() {
    Word<kBytes> words[kInFlight]{};
    load(words, left_);
    go_on(words);
  }

  // Stores what is loaded, and copies what is left.
  template <int kBytes>
  __device__ __forceinline__ void go_on(Word<kBytes> (&words)[kInFlight]) {
    constexpr int32_t kRound = kInFlight * kWarpSize * kBytes;
    store(words);
    HISPARSE_NO_UNROLL
    while (left_ > kRound) {
      left_ -= kRound;
      src_ += kRound;
      dst_ += kRound;
      load(words, left_);
      store(words);
    }
  }

  template <int kBytes>
  __device__ __forceinline__ void load(Word<kBytes> (&words)[kInFlight], int32_t left) const {
    constexpr int32_t kStep = kWarpSize * kBytes;
    HISPARSE_UNROLL
    for (int i = 0; i < kInFlight; ++i) load_streaming(words[i], src_ + i * kStep, i * kStep < left);
  }

  template <int kBytes>
  __device__ __forceinline__ void store(const Word<kBytes> (&words)[kInFlight]) const {
    constexpr int32_t kStep = kWarpSize * kBytes;
    HISPARSE_UNROLL
    for (int i = 0; i < kInFlight; ++i) store_cached(dst_ + i * kStep, words[i], i * kStep < left_);
  }

  const unsigned char* src_;
  unsigned char* dst_;
  int32_t left_;  // from the lane's word on; less than 1 where it has none
  int32_t word_bytes_;
  Word<16> first_[kInFlight]{};  // emptied, else ptxas keeps them in local memory
};

}  // namespace hisparse::HISPARSE_TARGET
