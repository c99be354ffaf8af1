// A thread looks after several elements of a row, one per turn. Where the number of turns is known, what
// belongs to a turn stays in registers; where it is not (kTurns = 0), it is kept in shared memory or loaded
// again.
#pragma once

namespace hisparse::HISPARSE_TARGET {

struct Share {
  int first;
  int end;
  int stride;
};

// Calls step(turn, index) for the indices of a share.
template <int kTurns, class Step>
__device__ __forceinline__ void for_each(const Share& share, Step step) {
  if constexpr (kTurns > 0) {
    HISPARSE_UNROLL
    for (int turn = 0; turn < kTurns; ++turn)
      if (share.first + turn * share.stride < share.end) step(turn, share.first + turn * share.stride);
  } else {
    HISPARSE_NO_UNROLL
    for (int index = share.first; index < share.end; index += share.stride) step(0, index);
  }
}

// The same, and past the end of the share where the number of turns is known.
template <int kTurns, class Step>
__device__ __forceinline__ void for_all(const Share& share, Step step) {
  if constexpr (kTurns > 0) {
    HISPARSE_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) step(turn, share.first + turn * share.stride);
  } else {
    for_each<kTurns>(share, step);
  }
}

// A value per turn that only this thread knows, in shared memory as a narrower Stored.
template <class T, class Stored, int kTurns>
class Kept {
 public:
  __device__ __forceinline__ explicit Kept(void*) {}
  __device__ __forceinline__ T get(int turn, int) const { return values_[turn]; }
  __device__ __forceinline__ void set(int turn, int, const T& value) { values_[turn] = value; }

 private:
  T values_[kTurns]{};
};

template <class T, class Stored>
class Kept<T, Stored, 0> {
 public:
  __device__ __forceinline__ explicit Kept(void* shared) : shared_(static_cast<Stored*>(shared)) {}
  __device__ __forceinline__ T get(int, int place) const { return static_cast<T>(shared_[place]); }
  __device__ __forceinline__ void set(int, int place, const T& value) {
    shared_[place] = static_cast<Stored>(value);
  }

 private:
  Stored* const shared_;
};

// A value per turn that can be loaded early, to arrive meanwhile, or else when it is wanted.
template <class T, int kTurns>
class Early {
 public:
  template <class Load>
  __device__ __forceinline__ void start(int turn, Load load) {
    values_[turn] = load();
  }
  template <class Load>
  __device__ __forceinline__ T get(int turn, Load) const {
    return values_[turn];
  }

 private:
  T values_[kTurns]{};
};

template <class T>
class Early<T, 0> {
 public:
  template <class Load>
  __device__ __forceinline__ void start(int, Load) {}
  template <class Load>
  __device__ __forceinline__ T get(int, Load load) const {
    return load();
  }
};

}  // namespace hisparse::HISPARSE_TARGET
