// Variants of the item copy: the shipped one, and those that leave a part out, so that the benchmark shows
// what that part brings.
#pragma once

#include "params.h"

namespace hisparse::HISPARSE_TARGET {

struct Shipped {
  static constexpr bool kStreams = true;  // loads say that the data is read once
  static constexpr bool kIsGated = true;  // AMD: steps of 16 bytes only where they fill a wavefront
};
struct PlainLoads : Shipped {
  static constexpr bool kStreams = false;
};
struct Ungated : Shipped {
  static constexpr bool kIsGated = false;
};

template <class Variant, int kBytes>
__device__ __forceinline__ void load_as(Word<kBytes>& word, const unsigned char* address, bool enabled) {
  if constexpr (Variant::kStreams) {
    load_streaming(word, address, enabled);
  } else {
    load_plain(word, address, enabled);
  }
}

}  // namespace hisparse::HISPARSE_TARGET
