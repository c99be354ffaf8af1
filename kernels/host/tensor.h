// Tensors of other libraries, seen as plain memory: torch tensors and NumPy arrays, and whatever else offers
// the DLPack exchange API.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "device.h"
#include "dlpack_abi.h"

namespace hisparse::host {

// A TypeError for a tensor of a type that decides itself what an op does with it, by a __torch_dispatch__:
// such as the tensors without memory that torch.export traces with.
class DispatchedTensor : public pybind11::type_error {
  using pybind11::type_error::type_error;
};

// A view of the memory behind a Python object. It borrows from the object, which has to outlive it.
class TensorView {
 public:
  TensorView() = default;
  // TypeError, naming `argument`, for anything that is no dense tensor or array; else DispatchedTensor.
  TensorView(const char* argument, pybind11::handle object);
  // As above, but empty for None.
  static TensorView optional(const char* argument, pybind11::handle object);

  TensorView(TensorView&&) = default;
  TensorView& operator=(TensorView&&) = default;
  TensorView(const TensorView&) = delete;
  TensorView& operator=(const TensorView&) = delete;

  explicit operator bool() const { return argument_ != nullptr; }
  const char* argument() const { return argument_; }
  Device device() const { return device_; }
  bool on_gpu() const { return device_.kind != DeviceKind::kCpu; }
  bool read_only() const { return read_only_; }
  int ndim() const { return ndim_; }
  int64_t size(int dimension) const { return shape_[dimension]; }
  int64_t stride(int dimension) const { return strides_[dimension]; }  // in elements
  bool is_integer(int bits) const { return type_code_ == dlpack::kInt && element_bits_ == bits; }
  bool has_dtype_of(const TensorView& other) const;
  bool is_unsigned(int bits) const { return type_code_ == dlpack::kUnsigned && element_bits_ == bits; }
  template <typename T>
  T* data() const {
    return static_cast<T*>(data_);
  }

  // Bytes of all elements. ValueError where they exceed 63 bits.
  int64_t bytes() const;
  bool is_row_major() const;

  std::string dtype_text() const;
  std::string shape_text() const;
  std::string strides_text() const;

  // The stream that the tensor's framework currently works on, on the tensor's device.
  void* current_stream() const;

 private:
  bool read_exchange_api();
  void read_torch_attributes();
  void read_numpy_array();
  void refuse_lazy_bits() const;
  void set_device(int32_t dlpack_type, int index);
  void own_layout(std::vector<int64_t> shape, const std::vector<int64_t>& strides);

  const char* argument_ = nullptr;
  PyObject* object_ = nullptr;
  const dlpack::ExchangeApi* api_ = nullptr;
  void* data_ = nullptr;
  const int64_t* shape_ = nullptr;
  const int64_t* strides_ = nullptr;
  int32_t ndim_ = 0;
  int32_t dlpack_device_type_ = dlpack::kCpu;
  int64_t element_bits_ = 0;
  Device device_;
  uint8_t type_code_ = dlpack::kOpaque;
  bool read_only_ = false;
  std::vector<int64_t> owned_layout_;  // where the object does not keep shape and strides itself
};

// Whether torch, where it is loaded, is the one of AMD's GPUs.
bool torch_is_for_rocm();

}  // namespace hisparse::host
