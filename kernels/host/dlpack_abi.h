// The part of the DLPack 1.x ABI through which a framework hands out its tensors in C:
// https://dmlc.github.io/dlpack
#pragma once

#include <cstdint>

namespace hisparse::host::dlpack {

inline constexpr uint32_t kMajorVersion = 1;
inline constexpr const char* kExchangeApiAttribute = "__dlpack_c_exchange_api__";
inline constexpr const char* kExchangeApiCapsule = "dlpack_exchange_api";

enum DeviceType : int32_t {
  kCpu = 1,
  kCuda = 2,
  kCudaHost = 3,
  kRocm = 10,
  kRocmHost = 11,
  kCudaManaged = 13,
};

enum TypeCode : uint8_t {
  kInt = 0,
  kUnsigned = 1,
  kFloat = 2,
  kOpaque = 3,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6
};

struct Device {
  int32_t type;
  int32_t index;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null stands for row-major before version 1.2
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major_version;
  uint32_t minor_version;
  ExchangeApi* previous;
  // Unused here: allocate a managed tensor, export a managed one, import one.
  void (*managed_functions[3])();
  // Borrowed from the object: valid until control returns to Python. 0, or -1 with a Python error set.
  int (*tensor_from_object)(void* object, Tensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_index, void** out);
};

}  // namespace hisparse::host::dlpack
