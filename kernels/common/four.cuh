// Neighbours of a row as one access where alignment allows.
#pragma once

namespace hisparse::HISPARSE_TARGET {

template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Neighbours {
  T at[kCount];
};
template <class T>
using Four = Neighbours<T, 4>;

// row[first .. first + 3], with `filler` from row[end] on; `aligned` where no such four straddles the end.
template <class T>
__device__ __forceinline__ Four<T> load_four(const T* row, int first, int end, bool aligned, T filler) {
  if (aligned) return *reinterpret_cast<const Four<T>*>(row + first);
  Four<T> four;
  HISPARSE_UNROLL
  for (int i = 0; i < 4; ++i) four.at[i] = first + i < end ? row[first + i] : filler;
  return four;
}

// For memory that is aligned for it.
template <int kCount, class T>
__device__ __forceinline__ Neighbours<T, kCount> get_neighbours(const T* address) {
  return *reinterpret_cast<const Neighbours<T, kCount>*>(address);
}
template <class T, int kCount>
__device__ __forceinline__ void put_neighbours(T* address, const Neighbours<T, kCount>& neighbours) {
  *reinterpret_cast<Neighbours<T, kCount>*>(address) = neighbours;
}

}  // namespace hisparse::HISPARSE_TARGET
