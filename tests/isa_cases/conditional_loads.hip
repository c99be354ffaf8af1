// Each load and each store stands under a condition: the compiler waits for the last round before each load.
#include "device.h"

extern "C" __global__ void BLOCKS_OF_UP_TO(1024)
    copy(Wide* dst, const Wide* src, const int* ends, int rounds) {
  int end[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) end[i] = ends[i];
#pragma nounroll
  for (int round = 0; round < rounds; ++round) {
    const int at = round * 4096 + thread_index();
    Wide words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (at < end[i]) words[i] = __builtin_nontemporal_load(src + at + i * 1024);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (at < end[i]) dst[at + i * 1024] = words[i];
  }
}
