// The loads may be kept in the first-level cache.
extern "C" __global__ void __launch_bounds__(1024) copy(ulonglong2* dst, const ulonglong2* src) {
  ulonglong2 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = src[threadIdx.x + i * 1024];
#pragma unroll
  for (int i = 0; i < 4; ++i) dst[threadIdx.x + i * 1024] = words[i];
}
