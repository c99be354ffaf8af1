#pragma once

namespace hisparse::HISPARSE_TARGET {

struct IndexedItems {
  const CopyItemsParams& p;

  __device__ __forceinline__ bool locate(int64_t item, const unsigned char*& from, unsigned char*& to) const {
    const int64_t src = p.src_indices[item];
    const int64_t dst = p.dst_indices[item];
    from = p.src.base + src * p.item_size_bytes;
    to = p.dst.base + dst * p.item_size_bytes;
    return src >= 0 && src < p.src.rows && dst >= 0 && dst < p.dst.rows;
  }
};

template <template <class> class Copy>
__device__ __forceinline__ void copy_items(const CopyItemsParams& params) {
  const IndexedItems items{params};
  Copy<IndexedItems> copy(items, params.count, static_cast<int32_t>(params.item_size_bytes), params.copy_word_bytes,
                          block_index() * block_size() + thread_index(), grid_size() * block_size());
  copy.start();
  copy.finish();
}

}  // namespace hisparse::HISPARSE_TARGET
