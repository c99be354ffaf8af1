// The arguments of the ops beside the swap-in: planned copies, tokens of all layers, translation.
#include <algorithm>

#include "arguments.h"
#include "checker.h"
#include "checks.h"
#include "launch_policy.h"

namespace hisparse::host {

PlannedCopyCall check_planned_copy(PyObject* const* arguments) {
  const TensorView miss_src("miss_src", arguments[0]);
  const TensorView miss_dst("miss_dst", arguments[1]);
  const TensorView miss_count("miss_count", arguments[2]);
  const TensorView num_real_reqs("num_real_reqs", arguments[3]);
  const TensorView host_cache("host_cache", arguments[4]);
  const TensorView device_buffer("device_buffer", arguments[5]);
  PlannedCopyCall call;
  call.item_size_bytes = read_integer("item_size_bytes", arguments[6], 1, kMaxItemBytes);
  call.num_blocks = read_integer("num_blocks", arguments[7], 1, kMaxCopyBlocks);
  call.block_size = read_integer("block_size", arguments[8], 1, INT64_MAX);
  call.is_dsv4 = read_flag("is_dsv4_layout", arguments[9]);
  PlannedCopyParams& params = call.params;
  params.skip_io = read_flag("skip_io", arguments[10]);
  if (call.is_dsv4) Checker::dsv4_item(call.item_size_bytes);

  const Checker check(device_buffer);
  check.table(miss_src, 64, Access::kRead, -1, "columns", 1);
  const int64_t batch = miss_src.size(0), width = miss_src.size(1);
  if (batch > 0 && width > INT32_MAX / batch) {
    value_error("miss_src", "a plan of fewer than 2**31 items", "shape " + miss_src.shape_text());
  }
  check.table(miss_dst, 32, Access::kRead, batch, "columns", 1);
  Checker::equal_row_strides(miss_dst, miss_src);
  check.vector(miss_count, 32, 32, Access::kRead, batch);
  check.vector(num_real_reqs, 32, 32, Access::kRead, -1);
  call.host_cache =
      check.item_pool(host_cache, Access::kRead, call.item_size_bytes, call.is_dsv4, params.host_cache.rows);
  check.item_pool(device_buffer, Access::kWrite, call.item_size_bytes, call.is_dsv4,
                  params.device_buffer.rows);

  params.miss_src = miss_src.data<const int64_t>();
  params.miss_dst = miss_dst.data<const int32_t>();
  params.miss_count = miss_count.data<const int32_t>();
  params.num_real_reqs = num_real_reqs.data<const int32_t>();
  params.plan_stride = miss_src.stride(0);
  params.plan_width = static_cast<int32_t>(std::min<int64_t>({width, miss_dst.size(1), INT32_MAX}));
  params.batch = static_cast<int32_t>(batch);
  params.host_cache.base = host_cache.data<const unsigned char>();
  params.device_buffer.base = device_buffer.data<unsigned char>();
  call.device = device_buffer.device();
  call.stream = device_buffer.current_stream();
  return call;
}

LayerTokensCall check_layer_tokens(PyObject* const* arguments) {
  const TensorView src_ptrs("src_ptrs", arguments[0]);
  const TensorView dst_ptrs("dst_ptrs", arguments[1]);
  const TensorView src_indices("src_indices", arguments[2]);
  const TensorView dst_indices("dst_indices", arguments[3]);
  LayerTokensCall call;
  call.block_size = read_integer("block_size", arguments[4], 1, INT64_MAX);

  const Checker check(src_ptrs);
  if (src_ptrs.ndim() != 1) value_error("src_ptrs", "shape [layers]", src_ptrs.shape_text());
  check.addresses(src_ptrs, src_ptrs.size(0));
  check.addresses(dst_ptrs, src_ptrs.size(0));
  check.on_device(src_indices);
  check.on_device(dst_indices);
  Checker::indices(src_indices, dst_indices);
  for (const TensorView* tensor : {&src_ptrs, &src_indices}) {
    if (tensor->size(0) > INT32_MAX)
      value_error(tensor->argument(), "fewer than 2**31 entries", std::to_string(tensor->size(0)));
  }

  LayerCopyParams& params = call.params;
  params.src_ptrs = src_ptrs.data<const uint64_t>();
  params.dst_ptrs = dst_ptrs.data<const uint64_t>();
  params.src_indices = src_indices.data<const int64_t>();
  params.dst_indices = dst_indices.data<const int64_t>();
  params.layers = static_cast<int32_t>(src_ptrs.size(0));
  params.count = static_cast<uint32_t>(src_indices.size(0));
  call.device = src_ptrs.device();
  call.stream = src_ptrs.current_stream();
  return call;
}

TranslateCall check_translation(pybind11::handle mapping_object, pybind11::handle locations_object,
                                pybind11::handle allocate, pybind11::object& output_object) {
  const TensorView mapping("mapping", mapping_object);
  const TensorView locations("locations", locations_object);
  const Checker check(locations);
  if (mapping.ndim() != 1) value_error("mapping", "shape [entries]", mapping.shape_text());
  check.vector(mapping, 32, 64, Access::kRead, mapping.size(0));
  Checker::integers(locations, 32, 64);
  if (locations.ndim() != 1) value_error("locations", "shape [N]", locations.shape_text());
  Checker::addressable(locations, Access::kRead, locations.is_integer(64) ? 64 : 32);

  const bool is_int64 = mapping.is_integer(64) || locations.is_integer(64);
  output_object =
      allocate(locations_object, (mapping.is_integer(64) ? mapping_object : locations_object).attr("dtype"));
  const TensorView output("output", output_object);
  check.vector(output, is_int64 ? 64 : 32, is_int64 ? 64 : 32, Access::kWrite, locations.size(0));

  TranslateCall call;
  TranslateParams& params = call.params;
  params.mapping = Checker::index_vector(mapping);
  params.locations = Checker::index_vector(locations);
  params.output = output.data<void>();
  params.mapping_size = mapping.size(0);
  params.locations_stride = locations.stride(0);
  params.count = locations.size(0);
  params.output_is_int64 = is_int64;
  call.device = locations.device();
  call.stream = locations.current_stream();
  return call;
}

}  // namespace hisparse::host
