// Keeps every rule: four loads that leave L1 first, then four stores.
extern "C" __global__ void __launch_bounds__(1024) copy(ulonglong2* dst, const ulonglong2* src, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const int at = round * 4096 + threadIdx.x;
    ulonglong2 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      asm volatile("ld.global.L1::evict_first.v2.b64 {%0, %1}, [%2];"
                   : "=l"(words[i].x), "=l"(words[i].y)
                   : "l"(src + at + i * 1024));
#pragma unroll
    for (int i = 0; i < 4; ++i) dst[at + i * 1024] = words[i];
  }
}
