// 8 bytes a lane.
#include "device.h"

extern "C" __global__ void BLOCKS_OF_UP_TO(1024)
    copy(unsigned long* dst, const unsigned long* src, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const int at = round * 1024 + thread_index();
    dst[at] = __builtin_nontemporal_load(src + at);
  }
}
