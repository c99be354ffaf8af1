#include "kvcacheio_checks.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <limits>

#include "arguments.h"
#include "checker.h"
#include "released_gil.h"

namespace hisparse::host {
namespace {

constexpr int64_t kMaxPlanes = int64_t{1} << 30;

// Which tensor says where the op runs: the first one on a GPU, else the last.
template <typename... Tensors>
const TensorView& anchor_of(const Tensors*... tensors) {
  const TensorView* anchor = nullptr;
  for (const TensorView* tensor : {static_cast<const TensorView*>(tensors)...})
    if (*tensor && (anchor == nullptr || !anchor->on_gpu())) anchor = tensor;
  return *anchor;
}

const char* pool_name(const TransferOp& op, bool is_src, int side) {
  constexpr const char* kNames[2][2][3] = {
      {{"dst_k", "dst_v", "dst"}, {"dst_k_layers", "dst_v_layers", "dst_layers"}},
      {{"src_k", "src_v", "src"}, {"src_k_layers", "src_v_layers", "src_layers"}}};
  const bool is_table = (is_src ? op.src : op.dst) == PoolLayout::kLayerTable;
  return kNames[is_src][is_table][op.is_latent ? 2 : side];
}

int64_t block_quota_from_environment() {
  constexpr const char* kName = "SGLANG_HICACHE_BLOCK_QUOTA";
  const char* value = std::getenv(kName);
  if (value == nullptr || *value == '\0') return 0;
  char* end = nullptr;
  const bool starts_with_digit = *value >= '0' && *value <= '9';
  const long long quota = std::strtoll(value, &end, 10);  // too large a number becomes the largest
  if (!starts_with_digit || *end != '\0' || quota < 1)
    value_error(kName, "a positive integer", text("'", value, "'"));
  return quota;
}

struct Sizes {
  int64_t item = 1, layout_dim = 0, num_layers = 1, page_size = 1, head_num = 1;
};

void check_sizes(const TransferOp& op, const Sizes& sizes, int64_t layer_id) {
  if (op.keeps_heads()) {
    for (const auto& [name, bytes] : {std::pair("item_size", sizes.item), {"layout_dim", sizes.layout_dim}}) {
      if (bytes % sizes.head_num == 0) continue;
      value_error("head_num", text("a divisor of ", name, " = ", bytes), std::to_string(sizes.head_num));
    }
  }
  if (sizes.num_layers > kMaxPlanes / 2 / sizes.head_num) {
    value_error(op.keeps_heads() ? "head_num" : "num_layers",
                text("at most ", kMaxPlanes / 2, " in all layers"),
                std::to_string(std::max(sizes.num_layers, sizes.head_num)));
  }
  if (sizes.layout_dim == 0) return;
  const int64_t least = sizes.num_layers * sizes.item;
  if (sizes.layout_dim < least) {
    value_error(op.has_pages(op.src) ? "src_layout_dim" : "dst_layout_dim",
                text("at least ", op.all_layers() ? "num_layers * " : "", "item_size = ", least),
                std::to_string(sizes.layout_dim));
  }
  const int64_t layers = sizes.layout_dim / sizes.item;
  if (layer_id < 0 || layer_id >= layers)
    throw std::out_of_range(text("layer_id: expected 0 to ", layers - 1, ", got ", layer_id));
}

// Fills one end of a transfer from its pools, or tables of layers.
template <typename Byte>
void check_end(const Checker& check, PoolLayout layout, const Sizes& sizes, Access access,
               const TensorView (&pools)[2], TransferEnd<Byte>& end, PoolMemory (&memory)[2]) {
  int64_t row = sizes.item, tokens_per_row = 1;
  const char* row_name = "item_size";
  if (layout == PoolLayout::kPageFirst) {
    end.layout = KvLayout::page_first(sizes.item, sizes.layout_dim);
    row = sizes.layout_dim;
    row_name = "layout_dim";
  } else if (layout == PoolLayout::kPageHead) {
    if (__builtin_mul_overflow(sizes.page_size, sizes.layout_dim, &row))
      value_error("page_size", text("a page that fits in memory, at layout_dim = ", sizes.layout_dim),
                  std::to_string(sizes.page_size));
    end.layout = KvLayout::page_head(sizes.item, sizes.layout_dim, sizes.page_size, sizes.head_num);
    tokens_per_row = sizes.page_size;
    row_name = "page_size * layout_dim";
  } else {
    end.layout = KvLayout::layer_first(sizes.item, sizes.head_num);
  }

  end.tokens = std::numeric_limits<int64_t>::max() / sizes.item;
  for (int side = 0; side < 2 && pools[side]; ++side) {
    if (layout == PoolLayout::kLayerTable) {
      check.addresses(pools[side], sizes.num_layers);
      end.layer_tables[side] = pools[side].template data<const uint64_t>();
      continue;
    }
    memory[side] = check.pool(pools[side], access, row_name, row, true);
    end.pools[side] = pools[side].template data<Byte>();
    const int64_t tokens = memory[side].bytes / row * tokens_per_row;
    if (layout == PoolLayout::kPageHead && tokens > std::numeric_limits<uint32_t>::max())
      value_error(pools[side].argument(), "at most 2**32 - 1 tokens", std::to_string(tokens));
    end.tokens = std::min(end.tokens, tokens);
  }
}

}  // namespace

TransferCall check_transfer(const TransferOp& op, PyObject* const* arguments) {
  const auto integer = [&](const char* name, int64_t least, int64_t most) {
    return read_integer(name, *arguments++, least, most);
  };
  TensorView src[2], dst[2];
  for (int side = 0; side < (op.is_latent ? 1 : 2); ++side) {
    src[side] = TensorView(pool_name(op, true, side), *arguments++);
    dst[side] = TensorView(pool_name(op, false, side), *arguments++);
  }
  const TensorView src_indices("src_indices", *arguments++);
  const TensorView dst_indices("dst_indices", *arguments++);

  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  TransferCall call;
  Sizes sizes;
  if (op.has_pages(op.src)) call.layer_id = read_layer("layer_id", *arguments++);
  sizes.item = integer("item_size", 1, kMaxItemBytes);
  if (op.has_pages(op.src)) sizes.layout_dim = integer("src_layout_dim", 1, kAny);
  if (op.has_pages(op.dst)) sizes.layout_dim = integer("dst_layout_dim", 1, kAny);
  if (op.all_layers()) sizes.num_layers = integer("num_layers", 1, kMaxPlanes);
  if (op.keeps_heads()) {
    sizes.page_size = integer("page_size", 1, std::numeric_limits<uint32_t>::max());
    sizes.head_num = integer("head_num", 1, kMaxItemBytes);
  }
  if (op.is_latent && !op.all_layers() && *arguments == Py_None) {
    call.block_quota = block_quota_from_environment();
    ++arguments;
  } else {
    call.block_quota = integer("block_quota", 1, kAny);
  }
  if (*arguments != Py_None) call.num_warps_per_block = integer("num_warps_per_block", 1, 1024);
  check_sizes(op, sizes, call.layer_id);

  const TensorView& anchor = anchor_of(&dst[0], &dst[1], &src[0], &src[1], &dst_indices, &src_indices);
  const Checker check(anchor);
  TransferParams& params = call.params;
  check_end(check, op.src, sizes, Access::kRead, src, params.src, call.src);
  check_end(check, op.dst, sizes, Access::kWrite, dst, params.dst, call.dst);
  check.on_device(src_indices);
  check.on_device(dst_indices);
  Checker::indices(src_indices, dst_indices);
  if (src_indices.size(0) > std::numeric_limits<int32_t>::max())
    value_error("src_indices", "fewer than 2**31 entries", std::to_string(src_indices.size(0)));

  params.src_indices = src_indices.data<const int64_t>();
  params.dst_indices = dst_indices.data<const int64_t>();
  params.count = static_cast<uint32_t>(src_indices.size(0));
  params.layers = static_cast<int32_t>(sizes.num_layers);
  params.heads = static_cast<int32_t>(sizes.head_num);
  params.planes = params.layers * params.heads * (op.is_latent ? 1 : 2);
  call.part_bytes = sizes.item / sizes.head_num;
  call.device = anchor.device();
  call.stream = anchor.current_stream();
  return call;
}

uintptr_t get_device_accessible_ptr(PyObject* object, PyObject* device_index) {
  const TensorView tensor("tensor", object);
  const int64_t index = read_integer("device_index", device_index, 0, std::numeric_limits<int32_t>::max());
  if (tensor.data<void>() == nullptr && tensor.bytes() > 0)
    value_error("tensor", "a tensor with storage", "one whose storage is missing or freed");
  if (tensor.on_gpu()) {
    if (tensor.device().index != index) {
      value_error("tensor", text("memory that device ", index, " can reach"),
                  text("a tensor on ", to_string(tensor.device())));
    }
    return reinterpret_cast<uintptr_t>(tensor.data<void>());
  }
  if (!tensor.is_row_major())
    value_error("tensor", "row-major storage", text("strides ", tensor.strides_text()));
  const PoolMemory memory{"tensor", tensor.bytes(), true};
  const bool prefers_rocm = torch_is_for_rocm();
  const ReleasedGil released;
  return device_accessible_address(tensor.data<void>(), memory, index, prefers_rocm);
}

}  // namespace hisparse::host
