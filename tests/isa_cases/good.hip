// Keeps every rule: four non-temporal loads, then four ordinary stores.
#include "device.h"

extern "C" __global__ void BLOCKS_OF_UP_TO(1024) copy(Wide* dst, const Wide* src, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const int at = round * 4096 + thread_index();
    Wide words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __builtin_nontemporal_load(src + at + i * 1024);
#pragma unroll
    for (int i = 0; i < 4; ++i) dst[at + i * 1024] = words[i];
  }
}
