// The loads have no non-temporal hint.
#include "device.h"

extern "C" __global__ void BLOCKS_OF_UP_TO(1024)
    copy(Wide* __restrict__ dst, const Wide* __restrict__ src, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const int at = round * 4096 + thread_index();
    Wide words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = src[at + i * 1024];
#pragma unroll
    for (int i = 0; i < 4; ++i) dst[at + i * 1024] = words[i];
  }
}
