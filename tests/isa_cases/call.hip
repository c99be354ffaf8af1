// A function that is called through a pointer.
#include "device.h"

__device__ Wide load(const Wide* src) { return __builtin_nontemporal_load(src); }
__device__ Wide load_negated(const Wide* src) { return ~__builtin_nontemporal_load(src); }

extern "C" __global__ void BLOCKS_OF_UP_TO(1024) copy(Wide* dst, const Wide* src, int negate) {
  Wide (*const function)(const Wide*) = negate ? load_negated : load;
  for (int i = 0; i < 4; ++i) dst[thread_index() + i * 1024] = function(src + thread_index() + i * 1024);
}
