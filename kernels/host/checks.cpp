#include "checks.h"

#include <algorithm>
#include <utility>

#include "arguments.h"
#include "checker.h"
#include "launch_policy.h"

namespace hisparse::host {
namespace {

void check_equal_row_strides(const TensorView& tensor, const TensorView& other) {
  if (tensor.size(0) == 0 || other.size(0) == 0 || tensor.stride(0) == other.stride(0)) return;
  value_error(tensor.argument(), text("the row stride of ", other.argument(), ", ", other.stride(0)),
              std::to_string(tensor.stride(0)));
}

IndexVector index_vector(const TensorView& tensor) {
  return {tensor.data<const void>(), tensor.is_integer(64)};
}

void check_plan(const Checker& check, const TensorView& miss_src, const TensorView& miss_dst,
                const TensorView& miss_count, SwapInParams& params) {
  if (!miss_src && !miss_dst && !miss_count) return;
  for (const auto& [tensor, name] : {std::pair(&miss_src, "miss_src"), std::pair(&miss_dst, "miss_dst"),
                                     std::pair(&miss_count, "miss_count")}) {
    if (!*tensor) value_error(name, "miss_src, miss_dst and miss_count all given, or none of them", "None");
  }
  check.table(miss_src, 64, Access::kWrite, params.batch, "num_top_k", params.num_top_k);
  check.table(miss_dst, 32, Access::kWrite, params.batch, "num_top_k", params.num_top_k);
  check_equal_row_strides(miss_dst, miss_src);
  check.vector(miss_count, 32, 32, Access::kWrite, params.batch);
  params.miss_src = miss_src.data<int64_t>();
  params.miss_dst = miss_dst.data<int32_t>();
  params.miss_count = miss_count.data<int32_t>();
  params.plan_stride = miss_src.stride(0);
}

}  // namespace

SwapInCall check_swap_in(PyObject* const* arguments) {
  const TensorView top_k_tokens("top_k_tokens", arguments[0]);
  const TensorView device_buffer_tokens("device_buffer_tokens", arguments[1]);
  const TensorView host_cache_locs("host_cache_locs", arguments[2]);
  const TensorView device_buffer_locs("device_buffer_locs", arguments[3]);
  const TensorView host_cache("host_cache", arguments[4]);
  const TensorView device_buffer("device_buffer", arguments[5]);
  const TensorView top_k_device_locs("top_k_device_locs", arguments[6]);
  const TensorView req_pool_indices("req_pool_indices", arguments[7]);
  const TensorView seq_lens("seq_lens", arguments[8]);
  const TensorView lru_slots("lru_slots", arguments[9]);
  const int64_t item_size_bytes = read_integer("item_size_bytes", arguments[10], 1, kMaxItemBytes);
  const int64_t num_top_k = read_integer("num_top_k", arguments[11], 1, INT64_MAX);
  const int64_t hot_buffer_size = read_integer("hot_buffer_size", arguments[12], 1, INT64_MAX);
  const int64_t page_size = read_integer("page_size", arguments[13], 1, INT64_MAX);
  const int64_t block_size = read_integer("block_size", arguments[14], 1, INT64_MAX);
  const TensorView num_real_reqs = TensorView::optional("num_real_reqs", arguments[15]);
  const TensorView miss_src = TensorView::optional("miss_src", arguments[16]);
  const TensorView miss_dst = TensorView::optional("miss_dst", arguments[17]);
  const TensorView miss_count = TensorView::optional("miss_count", arguments[18]);
  const bool skip_io = read_flag("skip_io", arguments[19]);
  const bool by_policy = arguments[20] == Py_None;

  if (hot_buffer_size > kMaxHotBufferSize) {
    value_error("hot_buffer_size", text("at most ", kMaxHotBufferSize, " (lru_slots is int16)"),
                std::to_string(hot_buffer_size));
  }
  if (hot_buffer_size < num_top_k) {
    value_error("hot_buffer_size", text("at least num_top_k = ", num_top_k), std::to_string(hot_buffer_size));
  }

  SwapInCall call;
  SwapInParams& params = call.params;
  call.block_size = block_size;
  call.blocks_per_request =
      by_policy
          ? 0
          : static_cast<int>(read_integer("blocks_per_request", arguments[20], 1, kMaxBlocksPerRequest));
  call.device = device_buffer.device();
  call.item_size_bytes = item_size_bytes;
  params.num_top_k = static_cast<int32_t>(num_top_k);
  params.hot_buffer_size = static_cast<int32_t>(hot_buffer_size);
  params.skip_io = skip_io;

  const Checker check(device_buffer);
  int64_t slots = 0;
  if (__builtin_add_overflow(hot_buffer_size, page_size, &slots)) slots = INT64_MAX;
  check.table(top_k_tokens, 32, Access::kRead, -1, "num_top_k", num_top_k);
  if (top_k_tokens.size(0) > INT32_MAX) {
    value_error("top_k_tokens", text("at most ", INT32_MAX, " rows"), std::to_string(top_k_tokens.size(0)));
  }
  params.batch = static_cast<int32_t>(top_k_tokens.size(0));
  check.table(device_buffer_tokens, 32, Access::kWrite, -1, "hot_buffer_size + page_size", slots);
  check.table(host_cache_locs, 64, Access::kRead, -1, "max_tokens", 0);
  check.table(device_buffer_locs, 32, Access::kRead, -1, "hot_buffer_size + page_size", slots);
  check_equal_row_strides(device_buffer_locs, device_buffer_tokens);
  call.host_cache = check.pool(host_cache, Access::kRead, "item_size_bytes", item_size_bytes, true);
  const PoolMemory buffer =
      check.pool(device_buffer, Access::kWrite, "item_size_bytes", item_size_bytes, false);
  check.table(top_k_device_locs, 32, Access::kWrite, params.batch, "num_top_k", num_top_k);
  check.vector(req_pool_indices, 32, 64, Access::kRead, params.batch);
  check.vector(seq_lens, 32, 64, Access::kRead, params.batch);
  check.table(lru_slots, 16, Access::kWrite, -1, "hot_buffer_size", hot_buffer_size);
  if (num_real_reqs) check.vector(num_real_reqs, 32, 32, Access::kRead, -1);
  check_plan(check, miss_src, miss_dst, miss_count, params);

  params.top_k_tokens = top_k_tokens.data<const int32_t>();
  params.top_k_stride = top_k_tokens.stride(0);
  params.top_k_device_locs = top_k_device_locs.data<int32_t>();
  params.device_locs_stride = top_k_device_locs.stride(0);
  params.device_buffer_tokens = device_buffer_tokens.data<int32_t>();
  params.device_buffer_locs = device_buffer_locs.data<const int32_t>();
  params.buffer_table_stride = device_buffer_tokens.stride(0);
  params.host_cache_locs = host_cache_locs.data<const int64_t>();
  params.host_locs_stride = host_cache_locs.stride(0);
  params.max_tokens = host_cache_locs.size(1);
  params.lru_slots = lru_slots.data<int16_t>();
  params.lru_stride = lru_slots.stride(0);
  params.table_rows = std::min(
      {device_buffer_tokens.size(0), device_buffer_locs.size(0), host_cache_locs.size(0), lru_slots.size(0)});
  params.req_pool_indices = index_vector(req_pool_indices);
  params.seq_lens = index_vector(seq_lens);
  params.num_real_reqs = num_real_reqs ? num_real_reqs.data<const int32_t>() : nullptr;
  params.host_cache = {host_cache.data<const unsigned char>(), call.host_cache.bytes / item_size_bytes};
  params.device_buffer = {device_buffer.data<unsigned char>(), buffer.bytes / item_size_bytes};
  call.stream = device_buffer.current_stream();
  return call;
}

CopyItemsCall check_copy_items(PyObject* const* arguments) {
  const TensorView src("src", arguments[0]);
  const TensorView dst("dst", arguments[1]);
  const TensorView src_indices("src_indices", arguments[2]);
  const TensorView dst_indices("dst_indices", arguments[3]);
  const int64_t item_size_bytes = read_integer("item_size_bytes", arguments[4], 1, kMaxItemBytes);
  const int64_t blocks =
      arguments[5] == Py_None ? 0 : read_integer("blocks", arguments[5], 1, kMaxCopyBlocks);

  // A pool on a GPU says where the op runs. Where both are on the host, the indices do.
  const TensorView& anchor = dst.on_gpu() ? dst : src.on_gpu() ? src : src_indices;
  const Checker check(anchor);
  CopyItemsCall call;
  CopyItemsParams& params = call.params;
  call.src = check.pool(src, Access::kRead, "item_size_bytes", item_size_bytes, true);
  call.dst = check.pool(dst, Access::kWrite, "item_size_bytes", item_size_bytes, true);
  if (src_indices.ndim() != 1) value_error("src_indices", "shape [N]", src_indices.shape_text());
  check.vector(src_indices, 64, 64, Access::kRead, src_indices.size(0));
  check.vector(dst_indices, 64, 64, Access::kRead, src_indices.size(0));

  params.src = {src.data<const unsigned char>(), call.src.bytes / item_size_bytes};
  params.dst = {dst.data<unsigned char>(), call.dst.bytes / item_size_bytes};
  params.src_indices = src_indices.data<const int64_t>();
  params.dst_indices = dst_indices.data<const int64_t>();
  params.count = src_indices.size(0);
  call.item_size_bytes = item_size_bytes;
  call.blocks = blocks;
  call.device = anchor.device();
  call.stream = anchor.current_stream();
  return call;
}

}  // namespace hisparse::host
