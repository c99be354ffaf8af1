// More values at a time than the registers that it is allowed.
#include "device.h"

extern "C" __global__ void BLOCKS_OF_UP_TO(1024) __attribute__((amdgpu_num_vgpr(24)))
copy(Wide* dst, const Wide* src) {
  Wide words[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i] = __builtin_nontemporal_load(src + thread_index() + i * 1024);
  __builtin_amdgcn_s_barrier();
#pragma unroll
  for (int i = 0; i < 16; ++i) dst[thread_index() + i * 1024] = words[i] + words[(i + 7) % 16];
}
