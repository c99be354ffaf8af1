// Checks of tensor arguments that the ops share.
#pragma once

#include <cstdint>

#include "launcher.h"
#include "tensor.h"

namespace hisparse::host {

inline constexpr int64_t kMaxItemBytes = int64_t{1} << 30;  // the kernels count within an item in 32 bits

enum class Access { kRead, kWrite };

// Checks tensors against the device that one of them, the anchor, is on.
class Checker {
 public:
  explicit Checker(const TensorView& anchor) : anchor_(anchor) {}

  // [rows, at least `columns`], row stride free. `rows` -1: any number.
  void table(const TensorView& tensor, int bits, Access access, int64_t rows, const char* columns_name,
             int64_t columns) const;

  // [length], contiguous. `length` -1: at least one entry.
  void vector(const TensorView& tensor, int least_bits, int most_bits, Access access, int64_t length) const;

  // uint64 [length], contiguous, read.
  void addresses(const TensorView& tensor, int64_t length) const;

  // Two int64 vectors of one length, contiguous, read; not for the device of the anchor alone.
  static void indices(const TensorView& src, const TensorView& dst);

  // Contiguous memory for at least one row of `row_bytes`, or for none. A pool that is read or written over
  // the link may be on the host.
  PoolMemory pool(const TensorView& tensor, Access access, const char* row_name, int64_t row_bytes,
                  bool may_be_on_host) const;

  // Contiguous memory for items of a swap-in: of any size, or DeepSeek-V4 pages. `rows` gets how many.
  PoolMemory item_pool(const TensorView& tensor, Access access, int64_t item_size_bytes, bool is_dsv4,
                       int64_t& rows) const;
  static void dsv4_item(int64_t item_size_bytes);

  void on_device(const TensorView& tensor) const;

  // For tables of two dimensions.
  static void equal_row_strides(const TensorView& tensor, const TensorView& other);
  static IndexVector index_vector(const TensorView& tensor) {
    return {tensor.data<const void>(), tensor.is_integer(64)};
  }
  static void integers(const TensorView& tensor, int least_bits, int most_bits);
  static void addressable(const TensorView& tensor, Access access, int bits);
  static void aligned(const TensorView& tensor, int bytes);

 private:
  static void contiguous_vector(const TensorView& tensor, Access access, int bits, int64_t length);

  const TensorView& anchor_;
};

}  // namespace hisparse::host
