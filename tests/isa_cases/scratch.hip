// An array that a run-time index reads lies in memory.
#include "device.h"

extern "C" __global__ void BLOCKS_OF_UP_TO(1024) copy(Wide* dst, const Wide* src, const int* order) {
  Wide words[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) words[i] = __builtin_nontemporal_load(src + thread_index() + i * 1024);
  for (int i = 0; i < 64; ++i) dst[thread_index() + i * 1024] = words[order[i] & 63];
}
