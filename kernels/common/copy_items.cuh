#pragma once

#include "item_address.cuh"
#include "params.h"

namespace hisparse::HISPARSE_TARGET {

struct IndexedItems {
  using Index = int64_t;
  static constexpr int32_t kTailAt = kNoTail;

  const CopyItemsParams& p;

  __device__ __forceinline__ bool locate(Index item, int32_t at, const unsigned char*& from,
                                         unsigned char*& to) const {
    const int64_t src = p.src_indices[item];
    const int64_t dst = p.dst_indices[item];
    if (src < 0 || src >= p.src.rows || dst < 0 || dst >= p.dst.rows) return false;
    from = item_address<LinearLayout>(p.src.base, src, at, p.copy.item_bytes);
    to = item_address<LinearLayout>(p.dst.base, dst, at, p.copy.item_bytes);
    return true;
  }
};

template <template <class> class Copy>
__device__ __forceinline__ void copy_items(const CopyItemsParams& params) {
  const IndexedItems items{params};
  Copy<IndexedItems> copy(items, params.count, params.copy);
  copy.start(block_index() * block_size() + thread_index(), grid_size() * block_size());
  copy.finish();
}

}  // namespace hisparse::HISPARSE_TARGET
