// More values at a time than the 32 registers that it is allowed.
extern "C" __global__ void __launch_bounds__(1024, 2) copy(ulonglong2* dst, const ulonglong2* src) {
  ulonglong2 words[16];
#pragma unroll
  for (int i = 0; i < 16; ++i)
    asm volatile("ld.global.L1::evict_first.v2.b64 {%0, %1}, [%2];"
                 : "=l"(words[i].x), "=l"(words[i].y)
                 : "l"(src + threadIdx.x + i * 1024));
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 16; ++i)
    dst[threadIdx.x + i * 1024] = {words[i].x + words[(i + 7) % 16].y, words[(i + 5) % 16].x};
}
