// Target primitives of the CPU target. The including file defines HISPARSE_TARGET (a namespace) and
// HISPARSE_CPU_WARP_SIZE (32 or 64) first. Mirrors kernels/cuda/primitives.cuh and kernels/hip/primitives.h
// name for name.
#pragma once

#include <cstdint>
#include <cstring>

#include "executor.h"

#define __device__
#define HISPARSE_UNROLL
#define HISPARSE_NO_UNROLL
#define __forceinline__ inline __attribute__((always_inline))

namespace hisparse::HISPARSE_TARGET {

constexpr int kWarpSize = HISPARSE_CPU_WARP_SIZE;

inline int thread_index() { return static_cast<int>(cpu::thread_index()); }
inline int block_index() { return static_cast<int>(cpu::block_index()); }
inline int block_size() { return static_cast<int>(cpu::block_size()); }
inline int block_part() { return static_cast<int>(cpu::block_part()); }
inline int grid_size() { return static_cast<int>(cpu::grid_size()); }
inline unsigned char* shared_memory() { return cpu::shared_memory(); }

// The defaults name the caller's line: a rendezvous that cannot work is reported there.
inline void block_barrier(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  cpu::block_barrier({file, line});
}

inline void warp_barrier(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  cpu::warp_barrier({file, line});
}
inline void keep_loads_ahead() {}

inline uint32_t warp_inclusive_sum(uint32_t value, const char* file = __builtin_FILE(),
                                   int line = __builtin_LINE()) {
  return static_cast<uint32_t>(cpu::warp_sum(value, thread_index() % kWarpSize + 1, {file, line}));
}

inline uint32_t warp_sum(uint32_t value, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return static_cast<uint32_t>(cpu::warp_sum(value, kWarpSize, {file, line}));
}

inline bool warp_any(bool value, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return warp_sum(value, file, line) > 0;
}
// Of a vote of the lanes of a warp: how many before this one say yes, and how many of all.
struct WarpVote {
  uint32_t before, all;
};
inline WarpVote warp_vote(bool value, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return {warp_inclusive_sum(value, file, line) - value, warp_sum(value, file, line)};
}
inline int population_count(uint32_t bits) { return __builtin_popcount(bits); }
// The smaller of the lower halves, and of the upper ones.
inline uint32_t min_of_halves(uint32_t a, uint32_t b) {
  const uint32_t low = (a & 0xFFFF) < (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF;
  return (a >> 16 < b >> 16 ? a >> 16 : b >> 16) << 16 | low;
}
inline uint32_t multiply_high(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }

template <class T>
inline T warp_uniform(T value) {
  return value;
}

template <class T>
inline T* settled(T* pointer) {
  return pointer;
}

inline uint32_t settled(uint32_t value) { return value; }

template <class T>
inline T* settled_shared(T* pointer) {
  return pointer;
}

template <class T>
inline T load_global(const T* address) {
  return *address;
}

// Several threads may store to one address: one of the values stays.
inline void shared_store_any(uint16_t* address, uint16_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
}
inline int32_t shared_exchange(int32_t* address, int32_t value) {
  return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
inline void shared_min(int32_t* address, int32_t value, bool enabled) {
  if (!enabled) return;
  int32_t seen = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (value < seen &&
         !__atomic_compare_exchange_n(address, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
inline uint32_t shared_fetch_or(uint32_t* address, uint32_t bits) {
  return __atomic_fetch_or(address, bits, __ATOMIC_RELAXED);
}
inline void device_min(uint64_t* address, uint64_t value) {
  uint64_t seen = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (value < seen &&
         !__atomic_compare_exchange_n(address, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
// Orders what a GPU orders by waiting for loads before an arrival (see the swap-in), so that ThreadSanitizer
// knows.
inline uint32_t device_fetch_add(uint32_t* address, uint32_t value) {
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}

template <int kBytes>
struct alignas(kBytes) Word {
  unsigned char bytes[kBytes];
};

// Typed accesses at full alignment, so that UndefinedBehaviorSanitizer reports a misaligned vector access.
template <int kBytes>
inline void load_streaming(Word<kBytes>& word, const unsigned char* address, bool enabled) {
  if (enabled) word = *reinterpret_cast<const Word<kBytes>*>(address);
}
template <int kBytes>
inline void load_plain(Word<kBytes>& word, const unsigned char* address, bool enabled) {
  load_streaming(word, address, enabled);
}
template <int kBytes>
inline void store_cached(unsigned char* address, const Word<kBytes>& word, bool enabled) {
  if (enabled) *reinterpret_cast<Word<kBytes>*>(address) = word;
}

template <class T>
inline void before_load(T&) {}
template <class T>
inline void after_load(T&) {}

// 64-bit accesses at any alignment.
inline uint64_t load_unaligned(const unsigned char* address) {
  uint64_t word;
  std::memcpy(&word, address, sizeof(word));
  return word;
}
inline void store_unaligned(unsigned char* address, uint64_t word) {
  std::memcpy(address, &word, sizeof(word));
}
inline unsigned char load_byte(const unsigned char* address) { return *address; }
inline void store_byte(unsigned char* address, unsigned char byte) { *address = byte; }

}  // namespace hisparse::HISPARSE_TARGET
