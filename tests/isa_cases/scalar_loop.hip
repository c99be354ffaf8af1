// One load in flight: each is stored before the next is issued.
#include "device.h"

extern "C" __global__ void BLOCKS_OF_UP_TO(1024) copy(Wide* dst, const Wide* src, int rounds) {
#pragma nounroll
  for (int round = 0; round < rounds; ++round) {
    const int at = round * 1024 + thread_index();
    dst[at] = __builtin_nontemporal_load(src + at);
  }
}
