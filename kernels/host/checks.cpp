#include "checks.h"

#include <algorithm>
#include <utility>

#include "arguments.h"
#include "checker.h"
#include "launch_policy.h"

namespace hisparse::host {
namespace {

void check_plan(const Checker& check, const TensorView& miss_src, const TensorView& miss_dst,
                const TensorView& miss_count, SwapInParams& params) {
  if (!miss_src && !miss_dst && !miss_count) return;
  for (const auto& [tensor, name] : {std::pair(&miss_src, "miss_src"), std::pair(&miss_dst, "miss_dst"),
                                     std::pair(&miss_count, "miss_count")}) {
    if (!*tensor) value_error(name, "miss_src, miss_dst and miss_count all given, or none of them", "None");
  }
  check.table(miss_src, 64, Access::kWrite, params.batch, "num_top_k", params.num_top_k);
  check.table(miss_dst, 32, Access::kWrite, params.batch, "num_top_k", params.num_top_k);
  Checker::equal_row_strides(miss_dst, miss_src);
  check.vector(miss_count, 32, 32, Access::kWrite, params.batch);
  params.miss_src = miss_src.data<int64_t>();
  params.miss_dst = miss_dst.data<int32_t>();
  params.miss_count = miss_count.data<int32_t>();
  params.plan_stride = miss_src.stride(0);
}

// Where the items of a swap-in come from and go to.
struct SwapInPools {
  TensorView host[2], device[2];  // the second of each for values, where there are two
};

void check_row_is_item(const TensorView& pool, int64_t item_size_bytes) {
  const int64_t rows = pool.ndim() > 0 ? pool.size(0) : 1;
  if (rows == 0 || (pool.ndim() > 0 && pool.bytes() / rows == item_size_bytes)) return;
  value_error(pool.argument(), text("rows of item_size_bytes = ", item_size_bytes, " bytes"),
              pool.ndim() > 0 ? text("rows of ", pool.bytes() / rows) : text("shape ", pool.shape_text()));
}

void check_pools(const Checker& check, const SwapInPools& pools, SwapInCall& call) {
  SwapInParams& params = call.params;
  const bool is_dsv4 = call.kind == SwapInKind::kDsv4;
  const int64_t item = call.item_size_bytes;
  call.host_cache = check.item_pool(pools.host[0], Access::kRead, item, is_dsv4, params.host_cache.rows);
  check.item_pool(pools.device[0], Access::kWrite, item, is_dsv4, params.device_buffer.rows);
  params.host_cache.base = pools.host[0].data<const unsigned char>();
  params.device_buffer.base = pools.device[0].data<unsigned char>();
  if (call.kind != SwapInKind::kBlocks) return;

  int64_t host_rows = 0, device_rows = 0;
  call.host_values = check.item_pool(pools.host[1], Access::kRead, item, false, host_rows);
  check.item_pool(pools.device[1], Access::kWrite, item, false, device_rows);
  for (const TensorView* pool : {&pools.host[0], &pools.host[1], &pools.device[0], &pools.device[1]})
    check_row_is_item(*pool, item);
  params.host_cache.rows = std::min(params.host_cache.rows, host_rows);
  params.device_buffer.rows = std::min(params.device_buffer.rows, device_rows);
  params.host_values = pools.host[1].data<const unsigned char>();
  params.device_values = pools.device[1].data<unsigned char>();
}

// The number of entries that the blocks of a row make.
int64_t check_block_entries(const TensorView& top_k_blocks, int64_t sparse_block_size,
                            int64_t hot_buffer_size) {
  if (top_k_blocks.ndim() != 2 || top_k_blocks.size(1) < 1)
    value_error("top_k_blocks", "shape [rows, at least 1]", top_k_blocks.shape_text());
  int64_t entries = 0;
  if (__builtin_mul_overflow(top_k_blocks.size(1), sparse_block_size, &entries)) entries = INT64_MAX;
  if (hot_buffer_size < entries) {
    value_error("hot_buffer_size",
                text("at least top_k_blocks.shape[1] * sparse_block_size = ", top_k_blocks.size(1), " * ",
                     sparse_block_size),
                std::to_string(hot_buffer_size));
  }
  return entries;
}

SwapInCall check_swap_in_of(SwapInKind kind, PyObject* const* arguments) {
  const bool by_blocks = kind == SwapInKind::kBlocks;
  const auto tensor = [&](const char* name) { return TensorView(name, *arguments++); };
  const auto optional = [&](const char* name) { return TensorView::optional(name, *arguments++); };
  const auto integer = [&](const char* name, int64_t most = INT64_MAX) {
    return read_integer(name, *arguments++, 1, most);
  };
  const TensorView top_k = tensor(by_blocks ? "top_k_blocks" : "top_k_tokens");
  const TensorView device_buffer_tokens = tensor("device_buffer_tokens");
  const TensorView host_cache_locs = tensor("host_cache_locs");
  const TensorView device_buffer_locs = tensor("device_buffer_locs");
  SwapInPools pools;
  pools.host[0] = tensor(by_blocks ? "host_cache_k" : "host_cache");
  if (by_blocks) pools.host[1] = tensor("host_cache_v");
  pools.device[0] = tensor(by_blocks ? "device_buffer_k" : "device_buffer");
  if (by_blocks) pools.device[1] = tensor("device_buffer_v");
  const TensorView top_k_device_locs = tensor("top_k_device_locs");
  const TensorView req_pool_indices = tensor("req_pool_indices");
  const TensorView seq_lens = tensor("seq_lens");
  const TensorView lru_slots = tensor("lru_slots");
  const int64_t item_size_bytes = integer("item_size_bytes", kMaxItemBytes);
  int64_t num_top_k = by_blocks ? 0 : integer("num_top_k");
  const int64_t hot_buffer_size = integer("hot_buffer_size");
  const int64_t sparse_block_size = by_blocks ? integer("sparse_block_size") : 1;
  const int64_t page_size = integer("page_size");
  const int64_t block_size = integer("block_size");
  const TensorView num_real_reqs = optional("num_real_reqs");
  TensorView miss_src, miss_dst, miss_count;
  if (!by_blocks) {
    miss_src = optional("miss_src");
    miss_dst = optional("miss_dst");
    miss_count = optional("miss_count");
  }
  const bool skip_io = read_flag("skip_io", *arguments++);
  const bool by_policy = *arguments == Py_None;

  if (hot_buffer_size > kMaxHotBufferSize) {
    value_error("hot_buffer_size", text("at most ", kMaxHotBufferSize, " (lru_slots is int16)"),
                std::to_string(hot_buffer_size));
  }
  if (by_blocks) num_top_k = check_block_entries(top_k, sparse_block_size, hot_buffer_size);
  if (hot_buffer_size < num_top_k) {
    value_error("hot_buffer_size", text("at least num_top_k = ", num_top_k), std::to_string(hot_buffer_size));
  }
  if (kind == SwapInKind::kDsv4) Checker::dsv4_item(item_size_bytes);

  SwapInCall call;
  SwapInParams& params = call.params;
  call.kind = kind;
  call.block_size = block_size;
  call.blocks_per_request =
      by_policy ? 0
                : static_cast<int>(read_integer("blocks_per_request", *arguments, 1, kMaxBlocksPerRequest));
  const TensorView& anchor = pools.device[0];
  call.device = anchor.device();
  call.item_size_bytes = item_size_bytes;
  params.num_top_k = static_cast<int32_t>(num_top_k);
  params.hot_buffer_size = static_cast<int32_t>(hot_buffer_size);
  params.blocks = TokenBlocks::make(static_cast<uint32_t>(sparse_block_size));
  params.skip_io = skip_io;

  const Checker check(anchor);
  const char* const entries = by_blocks ? "top_k_blocks.shape[1] * sparse_block_size" : "num_top_k";
  int64_t slots = 0;
  if (__builtin_add_overflow(hot_buffer_size, page_size, &slots)) slots = INT64_MAX;
  check.table(top_k, 32, Access::kRead, -1, "num_top_k", by_blocks ? 1 : num_top_k);
  if (top_k.size(0) > INT32_MAX) {
    value_error(top_k.argument(), text("at most ", INT32_MAX, " rows"), std::to_string(top_k.size(0)));
  }
  params.batch = static_cast<int32_t>(top_k.size(0));
  check.table(device_buffer_tokens, 32, Access::kWrite, -1, "hot_buffer_size + page_size", slots);
  check.table(host_cache_locs, 64, Access::kRead, -1, "max_tokens", 0);
  check.table(device_buffer_locs, 32, Access::kRead, -1, "hot_buffer_size + page_size", slots);
  Checker::equal_row_strides(device_buffer_locs, device_buffer_tokens);
  check_pools(check, pools, call);
  check.table(top_k_device_locs, 32, Access::kWrite, params.batch, entries, num_top_k);
  check.vector(req_pool_indices, 32, 64, Access::kRead, params.batch);
  check.vector(seq_lens, 32, 64, Access::kRead, params.batch);
  check.table(lru_slots, 16, Access::kWrite, -1, "hot_buffer_size", hot_buffer_size);
  if (num_real_reqs) check.vector(num_real_reqs, 32, 32, Access::kRead, -1);
  check_plan(check, miss_src, miss_dst, miss_count, params);

  params.top_k_tokens = top_k.data<const int32_t>();
  params.top_k_stride = top_k.stride(0);
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
  params.req_pool_indices = Checker::index_vector(req_pool_indices);
  params.seq_lens = Checker::index_vector(seq_lens);
  params.num_real_reqs = num_real_reqs ? num_real_reqs.data<const int32_t>() : nullptr;
  call.stream = anchor.current_stream();
  return call;
}

}  // namespace

SwapInCall check_swap_in(PyObject* const* arguments) {
  return check_swap_in_of(SwapInKind::kTokens, arguments);
}

SwapInCall check_dsv4_swap_in(PyObject* const* arguments) {
  return check_swap_in_of(SwapInKind::kDsv4, arguments);
}

SwapInCall check_block_swap_in(PyObject* const* arguments) {
  return check_swap_in_of(SwapInKind::kBlocks, arguments);
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
