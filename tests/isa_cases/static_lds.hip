// Shared memory beside what the launch asks for.
#include "device.h"

extern "C" __global__ void BLOCKS_OF_UP_TO(1024) copy(Wide* dst, const Wide* src) {
  __shared__ Wide words[1024];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[thread_index()] = __builtin_nontemporal_load(src + thread_index() + i * 1024);
    __builtin_amdgcn_s_barrier();
    dst[thread_index() + i * 1024] = words[1023 - thread_index()];
    __builtin_amdgcn_s_barrier();
  }
}
