// The layouts' address arithmetic for tests, with nothing around it.
#include <cstdint>

#include "../kernels/common/params.h"

using hisparse::Dsv4Layout;
using hisparse::KvLayout;
using hisparse::LinearLayout;
using hisparse::TokenBlocks;

static_assert(KvLayout::page_first(16, 64).offset(3, 2, 0) == 3 * 64 + 2 * 16,
              "the layouts are compile-time constants too");

extern "C" {
int64_t layer_first(int64_t item, int64_t head_num, int64_t token, int64_t head) {
  return KvLayout::layer_first(item, head_num).offset(token, 0, head);
}
int64_t page_first(int64_t item, int64_t layout_dim, int64_t token, int64_t layer) {
  return KvLayout::page_first(item, layout_dim).offset(token, layer, 0);
}
int64_t page_head(int64_t item, int64_t layout_dim, int64_t page_size, int64_t head_num, int64_t token,
                  int64_t layer, int64_t head) {
  return KvLayout::page_head(item, layout_dim, page_size, head_num).offset(token, layer, head);
}
int64_t linear(int64_t loc, int64_t at, int64_t item) {
  return static_cast<int64_t>(
      LinearLayout::offset(loc, static_cast<int32_t>(at), static_cast<uint32_t>(item)));
}
int64_t linear_of_32_bits(int64_t loc, int64_t at, int64_t item) {
  return static_cast<int64_t>(LinearLayout::offset(static_cast<uint32_t>(loc), static_cast<int32_t>(at),
                                                   static_cast<uint32_t>(item)));
}
int64_t dsv4(int64_t loc, int64_t at) {
  return static_cast<int64_t>(Dsv4Layout::offset(loc, static_cast<int32_t>(at)));
}
int64_t dsv4_of_32_bits(int64_t loc, int64_t at) {
  return static_cast<int64_t>(Dsv4Layout::offset(static_cast<uint32_t>(loc), static_cast<int32_t>(at)));
}
int64_t dsv4_rows(int64_t pool_bytes) { return Dsv4Layout::rows(pool_bytes); }
int64_t block_index_of(int64_t entry, int64_t tokens) {
  return TokenBlocks::make(static_cast<uint32_t>(tokens)).index_of(static_cast<uint32_t>(entry));
}
}
