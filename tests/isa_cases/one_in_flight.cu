// Each load is stored before the next.
extern "C" __global__ void __launch_bounds__(1024) copy(ulonglong2* dst, const ulonglong2* src, int rounds) {
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    const int at = round * 1024 + threadIdx.x;
    ulonglong2 word;
    asm volatile("ld.global.L1::evict_first.v2.b64 {%0, %1}, [%2];"
                 : "=l"(word.x), "=l"(word.y)
                 : "l"(src + at));
    dst[at] = word;
  }
}
