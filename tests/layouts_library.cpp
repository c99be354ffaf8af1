// The layouts' address arithmetic for tests, with nothing around it.
#include <cstdint>

#include "../kernels/common/layouts.h"

using hisparse::KvLayout;

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
}
