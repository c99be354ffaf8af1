// Where the bytes of a token lie in a pool of keys or values: the layouts of the transfer ops.
#pragma once

#include <cstdint>

namespace hisparse {

// An item is what a token has in one layer; a page holds page_size tokens. A layout cuts items into one part
// per head where the pool keeps them apart, else a part is the whole item. All numbers are bytes but for
// page_size.
struct KvLayout {
  int64_t page_size;  // tokens
  int64_t page_stride;
  int64_t token_stride;  // within a page
  int64_t layer_stride;
  int64_t head_stride;

  // [token]: one layer, or one of a table of layers that lie anywhere.
  static constexpr KvLayout layer_first(int64_t item, int64_t head_num = 1) {
    return {1, item, 0, 0, item / head_num};
  }

  // [token, layer], with layout_dim bytes per token.
  static constexpr KvLayout page_first(int64_t item, int64_t layout_dim) {
    return {1, layout_dim, 0, item, 0};
  }

  // [page, head, token in page, layer]
  static constexpr KvLayout page_head(int64_t item, int64_t layout_dim, int64_t page_size, int64_t head_num) {
    const int64_t token = layout_dim / head_num;
    return {page_size, page_size * layout_dim, token, item / head_num, page_size * token};
  }

  // From the start of the pool.
  constexpr int64_t offset(int64_t token, int64_t layer, int64_t head) const {
    return token_offset(token) + part_offset(layer, head);
  }

  // The two summands: what depends on the token, and what does not. Where page_size is not 1, it and the
  // token have 32 bits: GPUs have no division for 64.
  constexpr int64_t token_offset(int64_t token) const {
    if (page_size == 1) return token * page_stride;
    const auto number = static_cast<uint32_t>(token), size = static_cast<uint32_t>(page_size);
    return int64_t{number / size} * page_stride + int64_t{number % size} * token_stride;
  }
  constexpr int64_t part_offset(int64_t layer, int64_t head) const {
    return layer * layer_stride + head * head_stride;
  }
};

}  // namespace hisparse
