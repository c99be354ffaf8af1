// Target primitives of CUDA: everything that the shared kernels do not say in plain C++. All inline PTX is
// here.
#pragma once

#include <cstdint>

#define HISPARSE_TARGET cuda
#define HISPARSE_UNROLL _Pragma("unroll")
#define HISPARSE_NO_UNROLL _Pragma("unroll 1")

namespace hisparse::HISPARSE_TARGET {

constexpr int kWarpSize = 32;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

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
// Orders what the lanes of a warp do in shared memory.
__device__ __forceinline__ void warp_barrier() { __syncwarp(); }
// Keeps loads ahead of what follows, where ptxas would issue them last. Nothing else holds them: of volatile
// loads, and of an asm volatile behind them, it changes the order.
__device__ __forceinline__ void keep_loads_ahead() { __syncwarp(); }

// Sum over this lane and those before it. The shuffle says itself which lanes have a partner.
__device__ __forceinline__ uint32_t warp_inclusive_sum(uint32_t value) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2)
    asm volatile(
        "{\n .reg .pred p;\n .reg .b32 other;\n shfl.sync.up.b32 other|p, %0, %1, 0, 0xffffffff;\n"
        " @p add.u32 %0, %0, other;\n}"
        : "+r"(value)
        : "r"(distance));
  return value;
}
__device__ __forceinline__ uint32_t warp_sum(uint32_t value) { return __reduce_add_sync(kAllLanes, value); }

__device__ __forceinline__ bool warp_any(bool value) { return __any_sync(kAllLanes, value); }
// Of a vote of the lanes of a warp: how many before this one say yes, and how many of all.
struct WarpVote {
  uint32_t before, all;
};
__device__ __forceinline__ WarpVote warp_vote(bool value) {
  const uint32_t lanes = __ballot_sync(kAllLanes, value);
  uint32_t before;
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(before));
  return {static_cast<uint32_t>(__popc(lanes & before)), static_cast<uint32_t>(__popc(lanes))};
}
__device__ __forceinline__ int population_count(uint32_t bits) { return __popc(bits); }
// The smaller of the lower halves, and of the upper ones.
__device__ __forceinline__ uint32_t min_of_halves(uint32_t a, uint32_t b) { return __vminu2(a, b); }
__device__ __forceinline__ uint32_t multiply_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }

// A value that is the same in all lanes; a hint to the compiler on other targets.
template <class T>
__device__ __forceinline__ T warp_uniform(T value) {
  return value;
}

// A pointer into global memory that is computed here, once: the compiler would rather repeat the 64-bit
// multiplication at every use, seven instructions each.
template <class T>
__device__ __forceinline__ T* settled(T* pointer) {
  asm("" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// The same for shared memory, whose base would be put together from special registers at every use.
template <class T>
__device__ __forceinline__ T* settled_shared(T* pointer) {
  asm("" : "+l"(pointer));
  __builtin_assume(__isShared(pointer));
  return pointer;
}

// A number that is computed here, once.
__device__ __forceinline__ uint32_t settled(uint32_t value) {
  asm("" : "+r"(value));
  return value;
}

template <class T>
__device__ __forceinline__ T load_global(const T* address) {
  return *address;
}

// Several threads may store to one address: one of the values stays.
__device__ __forceinline__ void shared_store_any(uint16_t* address, uint16_t value) {
  *static_cast<volatile uint16_t*>(address) = value;
}
__device__ __forceinline__ int32_t shared_exchange(int32_t* address, int32_t value) {
  return atomicExch(address, value);
}
// Predicated, not branched around: five instructions less, for each of four slots.
__device__ __forceinline__ void shared_min(int32_t* address, int32_t value, bool enabled) {
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %2, 0;\n @p red.shared.min.s32 [%0], %1;\n}" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(address))),
               "r"(value), "r"(static_cast<int>(enabled))
               : "memory");
}
__device__ __forceinline__ uint32_t shared_fetch_or(uint32_t* address, uint32_t bits) {
  return atomicOr(address, bits);
}
__device__ __forceinline__ void device_min(uint64_t* address, uint64_t value) {
  atomicMin(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(value));
}
__device__ __forceinline__ uint32_t device_fetch_add(uint32_t* address, uint32_t value) {
  return atomicAdd(address, value);
}

template <int kBytes>
struct Word;
template <>
struct Word<16> {
  uint64_t low, high;
};
template <>
struct Word<8> {
  uint64_t value;
};
template <>
struct Word<4> {
  uint32_t value;
};
template <>
struct Word<1> {
  uint32_t value;
};

// Loads of a word where `enabled`; else it keeps its value.
#define HISPARSE_LOADS(name, instruction)                                                                   \
  __device__ __forceinline__ void name(Word<16>& word, const unsigned char* address, bool enabled) {        \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %3, 0;\n @p " instruction ".v2.b64 {%0, %1}, [%2];\n}" \
                 : "+l"(word.low), "+l"(word.high)                                                          \
                 : "l"(address), "r"(static_cast<int>(enabled)));                                           \
  }                                                                                                         \
  __device__ __forceinline__ void name(Word<8>& word, const unsigned char* address, bool enabled) {         \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %2, 0;\n @p " instruction ".b64 %0, [%1];\n}"          \
                 : "+l"(word.value)                                                                         \
                 : "l"(address), "r"(static_cast<int>(enabled)));                                           \
  }                                                                                                         \
  __device__ __forceinline__ void name(Word<4>& word, const unsigned char* address, bool enabled) {         \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %2, 0;\n @p " instruction ".b32 %0, [%1];\n}"          \
                 : "+r"(word.value)                                                                         \
                 : "l"(address), "r"(static_cast<int>(enabled)));                                           \
  }                                                                                                         \
  __device__ __forceinline__ void name(Word<1>& word, const unsigned char* address, bool enabled) {         \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %2, 0;\n @p " instruction ".u8 %0, [%1];\n}"           \
                 : "+r"(word.value)                                                                         \
                 : "l"(address), "r"(static_cast<int>(enabled)));                                           \
  }

// Reads data that nothing writes while the kernel runs, once, and leaves L1 early. Past L1, items of 656
// bytes took 2.5 % longer (H200, 41,000 from the host): two warps that share a sector each fetched it.
HISPARSE_LOADS(load_streaming, "ld.global.L1::evict_first")

// With no such hint.
HISPARSE_LOADS(load_plain, "ld.global")

#undef HISPARSE_LOADS

// Stores through L2, where attention reads the item next.
__device__ __forceinline__ void store_cached(unsigned char* address, const Word<16>& word, bool enabled) {
  if (enabled)
    asm volatile("st.global.cg.v2.b64 [%0], {%1, %2};" ::"l"(address), "l"(word.low), "l"(word.high)
                 : "memory");
}
__device__ __forceinline__ void store_cached(unsigned char* address, const Word<8>& word, bool enabled) {
  if (enabled) asm volatile("st.global.cg.b64 [%0], %1;" ::"l"(address), "l"(word.value) : "memory");
}
__device__ __forceinline__ void store_cached(unsigned char* address, const Word<4>& word, bool enabled) {
  if (enabled) asm volatile("st.global.cg.b32 [%0], %1;" ::"l"(address), "r"(word.value) : "memory");
}
__device__ __forceinline__ void store_cached(unsigned char* address, const Word<1>& word, bool enabled) {
  if (enabled) asm volatile("st.global.cg.u8 [%0], %1;" ::"l"(address), "r"(word.value) : "memory");
}

}  // namespace hisparse::HISPARSE_TARGET
