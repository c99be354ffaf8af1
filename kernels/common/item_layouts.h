// Where a pool of the swap-in ops keeps the bytes of an item: address arithmetic for host and device.
#pragma once

#include <cstdint>
#include <type_traits>

namespace hisparse {

// `offset` is where byte `at` of the item of `loc` is, from the start of the pool. The bytes from kTailAt on
// lie apart from those before.
inline constexpr int32_t kNoTail = INT32_MAX;

// [loc]: an item after the other, of any size.
struct LinearLayout {
  static constexpr int32_t kTailAt = kNoTail;
  static constexpr int kPools = 1;

  template <class Loc>
  static constexpr uint64_t offset(Loc loc, int32_t at, uint32_t item_bytes) {
    return static_cast<uint64_t>(loc) * item_bytes + static_cast<uint32_t>(at);
  }
  static constexpr int64_t rows(int64_t pool_bytes, int64_t item_bytes) { return pool_bytes / item_bytes; }
};

// The same in two pools, one of keys and one of values, with the same locs.
struct KeyValueLayout : LinearLayout {
  static constexpr int kPools = 2;
};

// The C4 cache of DeepSeek-V4: pages of 64 tokens, first their values, then their scales, then padding.
struct Dsv4Layout {
  static constexpr int32_t kValueBytes = 576;
  static constexpr int32_t kScaleBytes = 8;
  static constexpr int32_t kItemBytes = kValueBytes + kScaleBytes;
  static constexpr int32_t kPageTokens = 64;
  static constexpr int32_t kScalesAt = kPageTokens * kValueBytes;
  static constexpr int32_t kPageBytes =
      (kPageTokens * kItemBytes + kValueBytes - 1) / kValueBytes * kValueBytes;

  static constexpr int32_t kTailAt = kValueBytes;
  static constexpr int kPools = 1;

  template <class Loc>
  static constexpr uint64_t offset(Loc loc, int32_t at, uint32_t = kItemBytes) {
    const auto number = static_cast<std::make_unsigned_t<Loc>>(loc);
    const auto place = static_cast<uint32_t>(number % kPageTokens);
    const uint32_t in_page = at < kTailAt
                                 ? place * kValueBytes + static_cast<uint32_t>(at)
                                 : place * kScaleBytes + static_cast<uint32_t>(kScalesAt - kTailAt + at);
    return static_cast<uint64_t>(number / kPageTokens) * kPageBytes + in_page;
  }
  static constexpr int64_t rows(int64_t pool_bytes, int64_t = kItemBytes) {
    return pool_bytes / kPageBytes * kPageTokens;
  }
};
static_assert(Dsv4Layout::kPageBytes == 37440 && Dsv4Layout::kScalesAt == 36864);

}  // namespace hisparse
