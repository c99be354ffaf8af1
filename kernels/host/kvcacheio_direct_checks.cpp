// The ops of hisparse.kvcacheio that no kernel serves: the copy engine's, and the copy within CPU memory.
#include <algorithm>
#include <limits>

#include "arguments.h"
#include "checker.h"
#include "kvcacheio_checks.h"

namespace py = pybind11;

namespace hisparse::host {
namespace {

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

// The tensors of a list, each known by its place in it.
std::vector<TensorView> read_list(const char* argument, py::handle object, DirectCall& call) {
  if (!PyList_Check(object.ptr()) && !PyTuple_Check(object.ptr()))
    type_error(argument, "a list of tensors", type_name(object));
  std::vector<TensorView> tensors;
  for (const py::handle item : object) {
    call.names.push_back(text(argument, "[", tensors.size(), "]"));
    tensors.emplace_back(call.names.back().c_str(), item);
  }
  if (tensors.empty()) value_error(argument, "at least one tensor", "none");
  return tensors;
}

// Where the op runs: on the GPU that any of its tensors is on.
const TensorView& anchor_of(const std::vector<TensorView>& src, const std::vector<TensorView>& dst,
                            const TensorView& src_indices, const TensorView& dst_indices) {
  for (const auto* list : {&dst, &src}) {
    for (const TensorView& tensor : *list)
      if (tensor.on_gpu()) return tensor;
  }
  return src_indices.on_gpu() ? src_indices : dst_indices.on_gpu() ? dst_indices : dst.front();
}

void check_pool(const Checker& check, const TensorView& tensor, Access access, int least_dimensions,
                DirectCall& call) {
  if (tensor.ndim() < least_dimensions)
    value_error(tensor.argument(), text("at least ", least_dimensions, " dimensions"), tensor.shape_text());
  call.memory.emplace_back(tensor.data<const void>(), check.pool(tensor, access, "a row", 0, true));
}

int64_t row_bytes(const TensorView& tensor, int dimensions = 1) {
  if (tensor.bytes() == 0) return 0;  // else no product of some sizes exceeds that of all
  int64_t rows = 1;
  for (int i = 0; i < dimensions; ++i) rows *= tensor.size(i);
  return tensor.bytes() / rows;
}

void check_indices(const Checker& check, const TensorView& src, const TensorView& dst, int64_t page_size,
                   DirectCall& call) {
  for (const TensorView* indices : {&src, &dst})
    if (indices->on_gpu()) check.on_device(*indices);
  Checker::indices(src, dst);
  if (src.size(0) % page_size != 0) {
    value_error(src.argument(), text("a length that page_size = ", page_size, " divides"),
                std::to_string(src.size(0)));
  }
  call.src = {src.argument(), src.data<const int64_t>(), src.on_gpu(), false, kAny};
  call.dst = {dst.argument(), dst.data<const int64_t>(), dst.on_gpu(), false, kAny};
  call.count = src.size(0);
  call.page_size = page_size;
}

void check_equal(const TensorView& tensor, int64_t got, const TensorView& other, int64_t wanted) {
  if (got == wanted) return;
  value_error(tensor.argument(), text("tokens of ", wanted, " bytes, as in ", other.argument()),
              text("tokens of ", got, " bytes"));
}

// Keys and values or one latent pool, page first, against the layers of as many: the planes of both
// directions.
void check_pages(const Checker& check, const std::vector<TensorView>& pools,
                 const std::vector<TensorView>& layers, const char* pools_name, const char* layers_name,
                 bool to_pages, int64_t layer_id, DirectCall& call) {
  if (pools.size() > 2)
    value_error(pools_name, "one pool, or one of keys and one of values", std::to_string(pools.size()));
  if (layers.size() % pools.size() != 0)
    value_error(layers_name, "as many layers of keys as of values", text(layers.size(), " tensors"));
  const auto count = static_cast<int64_t>(layers.size() / pools.size());
  DirectIndices& paged = to_pages ? call.dst : call.src;
  DirectIndices& plain = to_pages ? call.src : call.dst;
  paged.of_pages = true;
  for (size_t side = 0; side < pools.size(); ++side) {
    const TensorView& pool = pools[side];
    check_pool(check, pool, to_pages ? Access::kWrite : Access::kRead, 3, call);
    if (pool.size(2) != call.page_size) {
      value_error(pool.argument(), text("shape [pages, layers, page_size = ", call.page_size, ", ...]"),
                  pool.shape_text());
    }
    const int64_t pool_layers = pool.size(1), token = row_bytes(pool, 3);
    if (layer_id < 0 || layer_id > pool_layers - count) {
      throw std::out_of_range(text("layer_id: expected layers within 0 to ", pool_layers - 1, " of ",
                                   pool.argument(), ", got ", layer_id, " to ", layer_id + count - 1));
    }
    int64_t pool_tokens = 0;
    if (!__builtin_mul_overflow(pool.size(0), call.page_size, &pool_tokens))  // else a pool without bytes
      paged.tokens = std::min(paged.tokens, pool_tokens);
    for (int64_t j = 0; j < count; ++j) {
      const TensorView& layer = layers[side * static_cast<size_t>(count) + static_cast<size_t>(j)];
      check_pool(check, layer, to_pages ? Access::kRead : Access::kWrite, 1, call);
      if (layer.size(0) > 0 && pool.size(0) > 0) check_equal(layer, row_bytes(layer), pool, token);
      plain.tokens = std::min(plain.tokens, layer.size(0));
      const int64_t block = call.page_size * token, offset = (layer_id + j) * block;
      DirectPlane plane{};
      plane.src = to_pages ? layer.data<const unsigned char>() : pool.data<const unsigned char>() + offset;
      plane.dst = to_pages ? pool.data<unsigned char>() + offset : layer.data<unsigned char>();
      plane.src_stride = to_pages ? token : pool_layers * block;
      plane.dst_stride = to_pages ? pool_layers * block : token;
      plane.token_bytes = token;
      call.planes.push_back(plane);
    }
  }
}

void set_device(const TensorView& anchor, DirectCall& call) {
  call.device = anchor.device();
  call.stream = anchor.current_stream();
}

// Both directions between page-first pools and layers; the one from the pools has a layer_id.
DirectCall check_direct_pages(PyObject* const* arguments, bool to_pages) {
  DirectCall call;
  const std::vector<TensorView> src = read_list("src_ptrs", arguments[0], call);
  const std::vector<TensorView> dst = read_list("dst_ptrs", arguments[1], call);
  const TensorView src_indices("src_indices", arguments[2]);
  const TensorView dst_indices("dst_indices", arguments[3]);
  const int64_t layer_id = to_pages ? 0 : read_layer("layer_id", arguments[4]);
  const int64_t page_size = read_integer("page_size", arguments[to_pages ? 4 : 5], 1, kAny);

  const TensorView& anchor = anchor_of(src, dst, src_indices, dst_indices);
  const Checker check(anchor);
  check_indices(check, src_indices, dst_indices, page_size, call);
  if (to_pages) {
    check_pages(check, dst, src, "dst_ptrs", "src_ptrs", true, 0, call);
  } else {
    check_pages(check, src, dst, "src_ptrs", "dst_ptrs", false, layer_id, call);
  }
  set_device(anchor, call);
  return call;
}

std::vector<int64_t> read_integers(const char* argument, py::handle object) {
  const bool is_text = PyUnicode_Check(object.ptr()) || PyBytes_Check(object.ptr());
  if (!PySequence_Check(object.ptr()) || is_text)
    type_error(argument, "a sequence of ints", type_name(object));
  std::vector<int64_t> values;
  for (const py::handle item : object) values.push_back(read_integer(argument, item, 0, kAny));
  return values;
}

void check_ranges(const char* argument, const TensorView& tensor, const std::vector<int64_t>& starts,
                  const std::vector<int64_t>& lengths) {
  if (starts.size() != lengths.size())
    value_error(argument, text(lengths.size(), " entries, as in lengths"), std::to_string(starts.size()));
  for (size_t i = 0; i < starts.size(); ++i) {
    if (lengths[i] <= tensor.size(0) && starts[i] <= tensor.size(0) - lengths[i]) continue;
    value_error(argument, text("ranges within the ", tensor.size(0), " rows of ", tensor.argument()),
                text("rows ", starts[i], " to ", starts[i], " + ", lengths[i], " - 1"));
  }
}

// Rows are found from addresses alone: at least, none may wrap around.
void check_rows(const LayerCopyCall& call) {
  int64_t last = -1, at = 0;
  for (int64_t i = 0; i < call.count; ++i) {
    if (call.sources[i] < 0 || call.targets[i] < 0) continue;
    if (std::max(call.sources[i], call.targets[i]) <= last) continue;
    last = std::max(call.sources[i], call.targets[i]);
    at = i;
  }
  for (int64_t layer = 0; last >= 0 && layer < call.layers; ++layer) {
    int64_t row = 0, end = 0;
    bool overflow = __builtin_mul_overflow(last, call.strides[layer], &row);
    overflow |= __builtin_add_overflow(row, call.strides[layer], &end);
    overflow |= call.data_ptrs[layer] > UINTPTR_MAX - static_cast<uint64_t>(end);
    if (!overflow) continue;
    value_error(
        call.targets[at] == last ? "tgt_loc" : "src_loc", "rows within 64 bits of address space",
        text(last, " at position ", at, ", with a stride of ", call.strides[layer], " in layer ", layer));
  }
}

}  // namespace

DirectCall check_direct(PyObject* const* arguments) {
  DirectCall call;
  const std::vector<TensorView> src = read_list("src_layers", arguments[0], call);
  const std::vector<TensorView> dst = read_list("dst_layers", arguments[1], call);
  const TensorView src_indices("src_indices", arguments[2]);
  const TensorView dst_indices("dst_indices", arguments[3]);
  const int64_t page_size = read_integer("page_size", arguments[4], 1, kAny);
  if (src.size() != dst.size())
    value_error("dst_layers", text(src.size(), " tensors, as in src_layers"), std::to_string(dst.size()));

  const TensorView& anchor = anchor_of(src, dst, src_indices, dst_indices);
  const Checker check(anchor);
  check_indices(check, src_indices, dst_indices, page_size, call);
  for (size_t i = 0; i < src.size(); ++i) {
    check_pool(check, src[i], Access::kRead, 1, call);
    check_pool(check, dst[i], Access::kWrite, 1, call);
    const int64_t token = row_bytes(src[i]);
    if (src[i].size(0) > 0 && dst[i].size(0) > 0) check_equal(dst[i], row_bytes(dst[i]), src[i], token);
    call.src.tokens = std::min(call.src.tokens, src[i].size(0));
    call.dst.tokens = std::min(call.dst.tokens, dst[i].size(0));
    call.planes.push_back(
        {src[i].data<const unsigned char>(), dst[i].data<unsigned char>(), token, token, token});
  }
  set_device(anchor, call);
  return call;
}

DirectCall check_direct_from_pages(PyObject* const* arguments) {
  return check_direct_pages(arguments, false);
}

DirectCall check_direct_to_pages(PyObject* const* arguments) { return check_direct_pages(arguments, true); }

DirectCall check_embedding_ranges(PyObject* const* arguments) {
  const TensorView src("src", arguments[0]);
  const TensorView dst("dst", arguments[1]);
  const std::vector<int64_t> src_starts = read_integers("src_starts", arguments[2]);
  const std::vector<int64_t> dst_starts = read_integers("dst_starts", arguments[3]);
  const std::vector<int64_t> lengths = read_integers("lengths", arguments[4]);

  const TensorView& anchor = src.on_gpu() ? src : dst;
  const Checker check(anchor);
  if (src.on_gpu() && dst.on_gpu()) {
    value_error("dst", text("a tensor on the CPU, since src is on ", to_string(src.device())),
                text("one on ", to_string(dst.device())));
  }
  DirectCall call;
  for (const TensorView* tensor : {&src, &dst}) {
    if (tensor->ndim() != 2) value_error(tensor->argument(), "shape [rows, columns]", tensor->shape_text());
    check_pool(check, *tensor, tensor == &dst ? Access::kWrite : Access::kRead, 2, call);
  }
  if (!dst.has_dtype_of(src))
    type_error("dst", text("dtype ", src.dtype_text(), ", as src"), dst.dtype_text());
  if (dst.size(1) != src.size(1))
    value_error("dst", text(src.size(1), " columns, as in src"), std::to_string(dst.size(1)));
  check_ranges("src_starts", src, src_starts, lengths);
  check_ranges("dst_starts", dst, dst_starts, lengths);

  const int64_t row = row_bytes(src);
  call.planes = {{src.data<const unsigned char>(), dst.data<unsigned char>(), row, row, row}};
  for (size_t i = 0; i < lengths.size(); ++i) call.runs.push_back({src_starts[i], dst_starts[i], lengths[i]});
  set_device(anchor, call);
  return call;
}

LayerCopyCall check_layer_copy(PyObject* const* arguments) {
  const TensorView data_ptrs("data_ptrs", arguments[0]);
  const TensorView strides("strides", arguments[1]);
  const TensorView tgt_loc("tgt_loc", arguments[2]);
  const TensorView src_loc("src_loc", arguments[3]);
  for (const TensorView* tensor : {&data_ptrs, &strides, &tgt_loc, &src_loc}) {
    if (!tensor->on_gpu()) continue;
    value_error(tensor->argument(), "a tensor on the CPU", text("one on ", to_string(tensor->device())));
  }
  const Checker check(data_ptrs);
  if (data_ptrs.ndim() != 1) value_error("data_ptrs", "shape [L]", data_ptrs.shape_text());
  check.addresses(data_ptrs, data_ptrs.size(0));
  check.vector(strides, 64, 64, Access::kRead, data_ptrs.size(0));
  Checker::indices(tgt_loc, src_loc);

  LayerCopyCall call{data_ptrs.data<const uint64_t>(),
                     strides.data<const int64_t>(),
                     tgt_loc.data<const int64_t>(),
                     src_loc.data<const int64_t>(),
                     data_ptrs.size(0),
                     tgt_loc.size(0)};
  for (int64_t layer = 0; layer < call.layers; ++layer) {
    if (call.strides[layer] < 1)
      value_error("strides", "at least 1 byte", text(call.strides[layer], " in layer ", layer));
    if (call.data_ptrs[layer] == 0) value_error("data_ptrs", "an address", text("0 in layer ", layer));
  }
  check_rows(call);
  return call;
}

}  // namespace hisparse::host
