// What the cases need of HIP, said with the compiler's own words: no headers, and they compile in a moment.
#pragma once

#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define BLOCKS_OF_UP_TO(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))

typedef unsigned Wide __attribute__((ext_vector_type(4)));  // 16 bytes

__device__ inline int thread_index() { return static_cast<int>(__builtin_amdgcn_workitem_id_x()); }
