// Target primitives of ROCm: everything that the shared kernels do not say in plain C++.
#pragma once

#include <hip/hip_runtime.h>

#include <cstdint>

#define HISPARSE_TARGET hip
#define HISPARSE_UNROLL _Pragma("unroll")
#define HISPARSE_NO_UNROLL _Pragma("nounroll")

namespace hisparse::HISPARSE_TARGET {

// Decided in the device pass of each arch, so that one fat binary is right on all: 64 on gfx9, 32 on gfx10
// and later.
#if defined(__GFX9__)
constexpr int kWarpSize = 64;
#else
constexpr int kWarpSize = 32;
#endif

__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int block_index() { return static_cast<int>(blockIdx.x); }
__device__ __forceinline__ int block_size() { return static_cast<int>(blockDim.x); }
__device__ __forceinline__ int block_part() { return static_cast<int>(blockIdx.y); }
__device__ __forceinline__ int grid_size() { return static_cast<int>(gridDim.x); }

__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return memory;
}

__device__ __forceinline__ void block_barrier() { __syncthreads(); }
// The lanes run in step, and LDS serves them in order: only the compiler has to be held back.
__device__ __forceinline__ void warp_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}
__device__ __forceinline__ void keep_loads_ahead() {}

__device__ __forceinline__ uint32_t warp_inclusive_sum(uint32_t value) {
  const int lane = thread_index() % kWarpSize;
  HISPARSE_UNROLL
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const uint32_t other = __shfl_up(value, static_cast<unsigned>(distance), kWarpSize);
    if (lane >= distance) value += other;
  }
  return value;
}
__device__ __forceinline__ uint32_t warp_sum(uint32_t value) {
  HISPARSE_UNROLL
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
    value += __shfl_xor(value, distance, kWarpSize);
  return value;
}

__device__ __forceinline__ bool warp_any(bool value) { return __any(value); }
// Of a vote of the lanes of a warp: how many before this one say yes, and how many of all.
struct WarpVote {
  uint32_t before, all;
};
__device__ __forceinline__ WarpVote warp_vote(bool value) {
  const uint64_t lanes = __ballot(value);
  const uint64_t before = (uint64_t{1} << thread_index() % kWarpSize) - 1;
  return {static_cast<uint32_t>(__popcll(lanes & before)), static_cast<uint32_t>(__popcll(lanes))};
}
__device__ __forceinline__ int population_count(uint32_t bits) { return __popc(bits); }
// The smaller of the lower halves, and of the upper ones.
__device__ __forceinline__ uint32_t min_of_halves(uint32_t a, uint32_t b) {
  using Halves = uint16_t __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(
      uint32_t, __builtin_elementwise_min(__builtin_bit_cast(Halves, a), __builtin_bit_cast(Halves, b)));
}
__device__ __forceinline__ uint32_t multiply_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }

// Moves a value that is the same in all lanes to scalar registers.
__device__ __forceinline__ int32_t warp_uniform(int32_t value) {
  return __builtin_amdgcn_readfirstlane(value);
}
template <class T>
__device__ __forceinline__ T* warp_uniform(T* pointer) {
  const auto bits = reinterpret_cast<uintptr_t>(pointer);
  const auto low = static_cast<uint32_t>(warp_uniform(static_cast<int32_t>(bits)));
  const auto high = static_cast<uint32_t>(warp_uniform(static_cast<int32_t>(bits >> 32)));
  return reinterpret_cast<T*>(static_cast<uintptr_t>(high) << 32 | low);
}

// Pools are global memory; said so, that the compiler emits global and not flat accesses.
template <class T>
using GlobalPointer = __attribute__((address_space(1))) T*;

// A pointer into global memory, kept in vector registers: the scalar ones are too few for all the rows, and
// gfx90a would spill.
template <class T>
__device__ __forceinline__ T* settled(T* pointer) {
  GlobalPointer<T> global = (GlobalPointer<T>)(reinterpret_cast<uintptr_t>(pointer));
  asm("" : "+v"(global));
  return (T*)(reinterpret_cast<uintptr_t>(global));
}

template <class T>
__device__ __forceinline__ T* settled_shared(T* pointer) {
  return pointer;
}

__device__ __forceinline__ uint32_t settled(uint32_t value) { return value; }

// Several threads may store to one address: one of the values stays.
__device__ __forceinline__ void shared_store_any(uint16_t* address, uint16_t value) { *address = value; }
__device__ __forceinline__ int32_t shared_exchange(int32_t* address, int32_t value) {
  return __hip_atomic_exchange(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
__device__ __forceinline__ void shared_min(int32_t* address, int32_t value, bool enabled) {
  if (enabled) __hip_atomic_fetch_min(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
__device__ __forceinline__ uint32_t shared_fetch_or(uint32_t* address, uint32_t bits) {
  return __hip_atomic_fetch_or(address, bits, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
__device__ __forceinline__ void device_min(uint64_t* address, uint64_t value) {
  __hip_atomic_fetch_min(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ __forceinline__ uint32_t device_fetch_add(uint32_t* address, uint32_t value) {
  return __hip_atomic_fetch_add(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

template <int kBytes>
struct Word;
template <>
struct Word<16> {
  uint32_t value __attribute__((ext_vector_type(4)));
};

template <class T, class Byte>
__device__ __forceinline__ GlobalPointer<T> as_global(Byte* address) {
  return (GlobalPointer<T>)(reinterpret_cast<uintptr_t>(address));
}

// For a load that stands beside one from shared memory, under the opposite condition: of two plain loads the
// compiler would make one flat load.
template <class T>
__device__ __forceinline__ T load_global(const T* address) {
  return *(GlobalPointer<const T>)(reinterpret_cast<uintptr_t>(address));
}

// Read once from host memory: a non-temporal load leaves L2 and MALL to the data that attention reads next.
__device__ __forceinline__ void load_streaming(Word<16>& word, const unsigned char* address, bool enabled) {
  using Vector = decltype(word.value);
  if (enabled) word.value = __builtin_nontemporal_load(as_global<const Vector>(address));
}
__device__ __forceinline__ void load_plain(Word<16>& word, const unsigned char* address, bool enabled) {
  using Vector = decltype(word.value);
  if (enabled) word.value = *as_global<const Vector>(address);
}
__device__ __forceinline__ void store_cached(unsigned char* address, const Word<16>& word, bool enabled) {
  using Vector = decltype(Word<16>::value);
  if (enabled) *as_global<Vector>(address) = word.value;
}

// A load and the store of its value may stand under the same condition; to the compiler they are independent.
// It takes the value of a load whose store was left out to be still on its way when its registers are used
// again, and waits for all loads there, in the middle of the next loads. These two put the waits where they
// belong: before the first load of a value, and after the last.
template <class T>
__device__ __forceinline__ void before_load(T& value) {
  asm volatile("" : "=v"(value));
}
template <class T>
__device__ __forceinline__ void after_load(T& value) {
  asm volatile("" : "+v"(value));
}
__device__ __forceinline__ void before_load(Word<16>& word) { before_load(word.value); }
__device__ __forceinline__ void after_load(Word<16>& word) { after_load(word.value); }

// 64-bit accesses at any alignment, as the hardware allows in global memory.
struct __attribute__((packed)) UnalignedWord {
  uint64_t value;
};
__device__ __forceinline__ uint64_t load_unaligned(const unsigned char* address) {
  return as_global<const UnalignedWord>(address)->value;
}
__device__ __forceinline__ void store_unaligned(unsigned char* address, uint64_t word) {
  as_global<UnalignedWord>(address)->value = word;
}

__device__ __forceinline__ unsigned char load_byte(const unsigned char* address) {
  return *as_global<const unsigned char>(address);
}
__device__ __forceinline__ void store_byte(unsigned char* address, unsigned char byte) {
  *as_global<unsigned char>(address) = byte;
}

}  // namespace hisparse::HISPARSE_TARGET
