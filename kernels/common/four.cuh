// Four neighbours of a row as one access where alignment allows.
#pragma once

namespace hisparse::HISPARSE_TARGET {

template <class T>
struct alignas(4 * sizeof(T)) Four {
  T at[4];
};

// row[first .. first + 3], with `filler` from row[end] on.
template <class T>
__device__ __forceinline__ Four<T> load_four(const T* row, int first, int end, bool aligned, T filler) {
  if (aligned && first + 4 <= end) return *reinterpret_cast<const Four<T>*>(row + first);
  Four<T> four;
  HISPARSE_UNROLL
  for (int i = 0; i < 4; ++i) four.at[i] = first + i < end ? row[first + i] : filler;
  return four;
}

// For shared memory that is aligned for it.
template <class T>
__device__ __forceinline__ Four<T> get_four(const T* address) {
  return *reinterpret_cast<const Four<T>*>(address);
}
template <class T>
__device__ __forceinline__ void put_four(T* address, const Four<T>& four) {
  *reinterpret_cast<Four<T>*>(address) = four;
}

}  // namespace hisparse::HISPARSE_TARGET
