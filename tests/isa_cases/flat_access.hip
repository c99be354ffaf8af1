// A pointer that may point to shared or to global memory.
#include "device.h"

extern "C" __global__ void BLOCKS_OF_UP_TO(1024) copy(Wide* dst, const Wide* src, int* counts, int shared) {
  extern __shared__ int shared_counts[];
  int* mine = shared ? shared_counts : counts;
  mine[thread_index()] += 1;
  Wide words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = __builtin_nontemporal_load(src + thread_index() + i * 1024);
#pragma unroll
  for (int i = 0; i < 4; ++i) dst[thread_index() + i * 1024] = words[i];
}
