#include "checker.h"

#include "arguments.h"

namespace hisparse::host {

void Checker::table(const TensorView& tensor, int bits, Access access, int64_t rows, const char* columns_name,
                    int64_t columns) const {
  integers(tensor, bits, bits);
  on_device(tensor);
  if (tensor.ndim() != 2 || (rows >= 0 && tensor.size(0) != rows) || tensor.size(1) < columns) {
    value_error(tensor.argument(),
                text("shape [", rows < 0 ? "rows" : std::to_string(rows), ", at least ", columns_name, " = ",
                     columns, "]"),
                tensor.shape_text());
  }
  if (tensor.size(0) > 0 && tensor.size(1) > 1 && tensor.stride(1) != 1) {
    value_error(tensor.argument(), "a contiguous last dimension (stride 1)",
                "strides " + tensor.strides_text());
  }
  addressable(tensor, access, bits);
  const int64_t row_stride = tensor.stride(0);
  if (access == Access::kWrite && tensor.size(0) > 1 && row_stride < columns && row_stride > -columns) {
    value_error(tensor.argument(), "rows that do not overlap", "strides " + tensor.strides_text());
  }
}

void Checker::vector(const TensorView& tensor, int least_bits, int most_bits, Access access,
                     int64_t length) const {
  integers(tensor, least_bits, most_bits);
  on_device(tensor);
  contiguous_vector(tensor, access, tensor.is_integer(32) ? 32 : 64, length);
}

void Checker::addresses(const TensorView& tensor, int64_t length) const {
  if (!tensor.is_unsigned(64)) type_error(tensor.argument(), "dtype uint64", tensor.dtype_text());
  on_device(tensor);
  contiguous_vector(tensor, Access::kRead, 64, length);
}

void Checker::indices(const TensorView& src, const TensorView& dst) {
  integers(src, 64, 64);
  integers(dst, 64, 64);
  if (src.ndim() != 1) value_error(src.argument(), "shape [N]", src.shape_text());
  contiguous_vector(src, Access::kRead, 64, src.size(0));
  contiguous_vector(dst, Access::kRead, 64, src.size(0));
}

PoolMemory Checker::pool(const TensorView& tensor, Access access, const char* row_name, int64_t row_bytes,
                         bool may_be_on_host) const {
  if (tensor.on_gpu() || !may_be_on_host) on_device(tensor);
  if (!tensor.is_row_major()) {
    throw std::invalid_argument(text(tensor.argument(),
                                     ": needs contiguous rows: expected row-major storage, got shape ",
                                     tensor.shape_text(), " with strides ", tensor.strides_text()));
  }
  addressable(tensor, access, 8);
  const int64_t bytes = tensor.bytes();
  if (bytes > 0 && bytes < row_bytes) {
    value_error(tensor.argument(), text("room for at least one item of ", row_name, " = ", row_bytes),
                text(bytes, " bytes"));
  }
  return {tensor.argument(), bytes, !tensor.on_gpu()};
}

PoolMemory Checker::item_pool(const TensorView& tensor, Access access, int64_t item_size_bytes, bool is_dsv4,
                              int64_t& rows) const {
  const bool may_be_on_host = access == Access::kRead;
  if (is_dsv4) {
    const PoolMemory memory =
        pool(tensor, access, "64 tokens (a page)", Dsv4Layout::kPageBytes, may_be_on_host);
    aligned(tensor, 8);
    rows = Dsv4Layout::rows(memory.bytes);
    return memory;
  }
  const PoolMemory memory = pool(tensor, access, "item_size_bytes", item_size_bytes, may_be_on_host);
  rows = LinearLayout::rows(memory.bytes, item_size_bytes);
  return memory;
}

void Checker::dsv4_item(int64_t item_size_bytes) {
  if (item_size_bytes == Dsv4Layout::kItemBytes) return;
  value_error("item_size_bytes",
              text(Dsv4Layout::kItemBytes, " (a value of ", Dsv4Layout::kValueBytes, " bytes and a scale of ",
                   Dsv4Layout::kScaleBytes, ")"),
              std::to_string(item_size_bytes));
}

void Checker::equal_row_strides(const TensorView& tensor, const TensorView& other) {
  if (tensor.size(0) == 0 || other.size(0) == 0 || tensor.stride(0) == other.stride(0)) return;
  value_error(tensor.argument(), text("the row stride of ", other.argument(), ", ", other.stride(0)),
              std::to_string(tensor.stride(0)));
}

void Checker::on_device(const TensorView& tensor) const {
  if (tensor.device() == anchor_.device()) return;
  value_error(tensor.argument(),
              text("a tensor on ", to_string(anchor_.device()), ", where ", anchor_.argument(), " is"),
              text("one on ", to_string(tensor.device())));
}

void Checker::integers(const TensorView& tensor, int least_bits, int most_bits) {
  if (tensor.is_integer(least_bits) || tensor.is_integer(most_bits)) return;
  type_error(tensor.argument(),
             least_bits == most_bits ? text("dtype int", least_bits)
                                     : text("dtype int", least_bits, " or int", most_bits),
             tensor.dtype_text());
}

void Checker::contiguous_vector(const TensorView& tensor, Access access, int bits, int64_t length) {
  if (tensor.ndim() != 1 || (length < 0 ? tensor.size(0) < 1 : tensor.size(0) != length)) {
    value_error(tensor.argument(), text("shape [", length < 0 ? "at least 1" : std::to_string(length), "]"),
                tensor.shape_text());
  }
  if (tensor.size(0) > 1 && tensor.stride(0) != 1) {
    value_error(tensor.argument(), "a contiguous tensor (stride 1)", "strides " + tensor.strides_text());
  }
  addressable(tensor, access, bits);
}

void Checker::addressable(const TensorView& tensor, Access access, int bits) {
  if (access == Access::kWrite && tensor.read_only()) {
    value_error(tensor.argument(), "a writable array", "a read-only one");
  }
  int64_t reach = 0;  // bytes from the first element to the farthest, roughly
  bool overflow = false, empty = false;
  for (int i = 0; i < tensor.ndim(); ++i) {
    int64_t along = 0;
    if (tensor.size(i) == 0) empty = true;
    overflow |= __builtin_mul_overflow(tensor.size(i), tensor.stride(i), &along);
    overflow |= __builtin_add_overflow(reach, along < 0 ? -(along + 1) : along, &reach);
  }
  if (empty) return;
  overflow |= __builtin_mul_overflow(reach, int64_t{8}, &reach);
  if (overflow) {
    value_error(tensor.argument(), "a size that fits in memory",
                text("shape ", tensor.shape_text(), " with strides ", tensor.strides_text()));
  }
  if (tensor.data<void>() == nullptr) {
    value_error(tensor.argument(), "a tensor with storage", "one whose storage is missing or freed");
  }
  aligned(tensor, bits / 8);
}

void Checker::aligned(const TensorView& tensor, int bytes) {
  if (reinterpret_cast<uintptr_t>(tensor.data<void>()) % bytes == 0) return;
  value_error(tensor.argument(), text("data aligned to ", bytes, " bytes"),
              text("address ", tensor.data<void>()));
}

}  // namespace hisparse::host
