// A driver library without a GPU: the functions that hisparse binds, as CUDA (libcuda) or, with FAKE_HIP, as
// HIP (libamdhip64). Tests load it in the driver's place, set it up through the fake_* functions, and read
// what was called.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "../kernels/common/params.h"

#ifdef FAKE_HIP
#define NAME(cuda, hip) hip
constexpr int kWarpSizeAttribute = 87, kThreadsAttribute = 56, kMultiprocessorsAttribute = 63,
              kSharedAttribute = 74;
#else
#define NAME(cuda, hip) cuda
constexpr int kWarpSizeAttribute = 10, kThreadsAttribute = 1, kMultiprocessorsAttribute = 16,
              kSharedAttribute = 97;
#endif
#define STRING_OF(name) #name
#define STRING(name) STRING_OF(name)

namespace {

struct Mapping {
  uintptr_t host, device;
  size_t bytes;
};

struct Launch {
  unsigned blocks, parts, threads, shared_bytes;
  int device;
  void* stream;
  hisparse::SwapInParams params;
};

std::mutex mutex;
std::vector<std::string> calls;
std::map<std::string, int> failures;
std::vector<Mapping> mappings;
Launch last{};
hisparse::TransferParams last_transfer{};
int last_variant = 0;
size_t copied = 0, largest_batch = 0;
int devices = 2, shared_bytes = 65536, capturing = 0, last_error = 0;
thread_local int capture_mode = 0;
thread_local std::vector<int> current_devices{0};

constexpr int kCopyItems = 1000, kVariant = 100, kTransfer = 2000;

// Contexts, modules and kernels stand for a device: one more than its index, so that none is null; kernels
// that copy items are kCopyItems further on, their variants kVariant more each, those that transfer kTransfer.
void* handle(int device) { return reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1); }
int device_of(const void* handle) { return static_cast<int>(reinterpret_cast<intptr_t>(handle)) - 1; }

int finish(const char* name, int code = 0) {
  const std::lock_guard<std::mutex> lock(mutex);
  calls.push_back(name);
  const auto found = failures.find(name);
  if (found != failures.end()) code = found->second;
  if (code != 0) last_error = code;
  return code;
}

// What a capturing thread may not do unless it is in relaxed mode.
int finish_unsafe(const char* name) { return finish(name, capturing && capture_mode != 2 ? 900 : 0); }

const Mapping* find(uintptr_t address, uintptr_t Mapping::* side) {
  for (const Mapping& mapping : mappings)
    if (address - mapping.*side < mapping.bytes) return &mapping;
  return nullptr;
}

}  // namespace

#define DRIVER_FUNCTION(cuda, hip, ...)                       \
  constexpr const char* hip##_name = STRING(NAME(cuda, hip)); \
  extern "C" int NAME(cuda, hip)(__VA_ARGS__)

extern "C" {
void fake_fail(const char* name, int code) {
  if (code != 0) {
    failures[name] = code;
  } else {
    failures.erase(name);
  }
}
void fake_setup(int device_count, int shared) {
  devices = device_count;
  shared_bytes = shared;
}
void fake_capture(int on) { capturing = on; }
void fake_map(uintptr_t host, uintptr_t device, size_t bytes) { mappings.push_back({host, device, bytes}); }
void fake_unmap_all() { mappings.clear(); }
void fake_set_current(int device) { current_devices.back() = device; }
int fake_current() { return current_devices.back(); }
int fake_last_error() { return last_error; }
const Launch* fake_last_launch() { return &last; }
uint32_t* fake_arrivals() { return last.params.arrivals; }
uintptr_t fake_host_cache() { return reinterpret_cast<uintptr_t>(last.params.host_cache.base); }
uintptr_t fake_transfer_src(int side) { return reinterpret_cast<uintptr_t>(last_transfer.src.pools[side]); }
uintptr_t fake_transfer_dst(int side) { return reinterpret_cast<uintptr_t>(last_transfer.dst.pools[side]); }
int fake_variant() { return last_variant; }
int fake_word_bytes() { return last.params.copy.word_bytes; }
size_t fake_copied() { return copied; }
size_t fake_largest_batch() { return largest_batch; }
int fake_count(const char* name) {
  int count = 0;
  for (const std::string& call : calls) count += call == name;
  return count;
}
}

DRIVER_FUNCTION(cuInit, hipInit, unsigned) { return finish(hipInit_name); }

DRIVER_FUNCTION(cuDeviceGetCount, hipGetDeviceCount, int* count) {
  *count = devices;
  return finish(hipGetDeviceCount_name);
}

DRIVER_FUNCTION(cuDriverGetVersion, hipRuntimeGetVersion, int* version) {
  *version = NAME(12080, 70125424);
  return finish(hipRuntimeGetVersion_name);
}

DRIVER_FUNCTION(cuDeviceGetName, hipDeviceGetName, char* name, int size, int) {
  std::strncpy(name, "Fake GPU", size);
  return finish(hipDeviceGetName_name);
}

DRIVER_FUNCTION(cuDeviceGetAttribute, hipDeviceGetAttribute, int* value, int attribute, int device) {
  const std::map<int, int> values{{kWarpSizeAttribute, 32},
                                  {kThreadsAttribute, 1024},
                                  {kMultiprocessorsAttribute, 10},
                                  {kSharedAttribute, shared_bytes},
                                  {75, 7},  // compute capability
                                  {76, 5 + device}};
  *value = values.at(attribute);
  return finish(hipDeviceGetAttribute_name);
}

DRIVER_FUNCTION(cuModuleLoadData, hipModuleLoadData, void** module, const void*) {
  *module = handle(current_devices.back());
  return finish_unsafe(hipModuleLoadData_name);
}

DRIVER_FUNCTION(cuModuleGetFunction, hipModuleGetFunction, void** kernel, void* module, const char* name) {
  const int step = std::strcmp(name, "hisparse_copy_items") == 0 ? kCopyItems
                   : std::strcmp(name, "hisparse_copy_items_plain_loads") == 0 ? kCopyItems + kVariant
                   : std::strcmp(name, "hisparse_copy_items_ungated") == 0 ? kCopyItems + 2 * kVariant
                   : std::strcmp(name, "hisparse_transfer") == 0 ? kTransfer
                                                                 : 0;
  *kernel = handle(device_of(module) + step);
  return finish(hipModuleGetFunction_name);
}

#ifndef FAKE_OLD_DRIVER
DRIVER_FUNCTION(cuStreamGetId, hipStreamGetId, void* stream, unsigned long long* id) {
  *id = 7000 + reinterpret_cast<uintptr_t>(stream);
  return finish(hipStreamGetId_name);
}
#endif

#ifndef FAKE_WITHOUT_LAUNCH
DRIVER_FUNCTION(cuLaunchKernel, hipModuleLaunchKernel, void* kernel, unsigned grid_x, unsigned grid_y,
                unsigned, unsigned block_x, unsigned, unsigned, unsigned shared, void* stream,
                void** parameters, void**) {
  const int device = device_of(kernel) % kVariant;
  const int code = finish(hipModuleLaunchKernel_name, device == current_devices.back() ? 0 : 201);
  const std::lock_guard<std::mutex> lock(mutex);
  if (code == 0) {
    last = {grid_x, grid_y, block_x, shared, device, stream, {}};
    last_variant = device_of(kernel) % kCopyItems / kVariant;
    if (device_of(kernel) < kCopyItems) std::memcpy(&last.params, parameters[0], sizeof(last.params));
    if (device_of(kernel) >= kTransfer) std::memcpy(&last_transfer, parameters[0], sizeof(last_transfer));
  }
  return code;
}
#endif

DRIVER_FUNCTION(cuMemAlloc_v2, hipMalloc, void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  std::memset(*memory, 0xFF, bytes);
  return finish_unsafe(hipMalloc_name);
}

DRIVER_FUNCTION(cuMemsetD8Async, hipMemsetD8Async, void* memory, unsigned char value, size_t bytes,
                void* stream) {
  std::memset(memory, value, bytes);
  return finish(hipMemsetD8Async_name, stream == nullptr);  // the default stream would break a capture
}

DRIVER_FUNCTION(cuStreamCreate, hipStreamCreateWithFlags, void** stream, unsigned flags) {
  *stream = handle(0);
  return finish(hipStreamCreateWithFlags_name, flags != 1);
}

DRIVER_FUNCTION(cuStreamSynchronize, hipStreamSynchronize, void*) {
  return finish(hipStreamSynchronize_name);
}

DRIVER_FUNCTION(cuStreamDestroy_v2, hipStreamDestroy, void*) { return finish(hipStreamDestroy_name); }

DRIVER_FUNCTION(cuStreamIsCapturing, hipStreamIsCapturing, void*, int* status) {
  *status = capturing;
  return finish(hipStreamIsCapturing_name);
}

DRIVER_FUNCTION(cuThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode, int* mode) {
  std::swap(*mode, capture_mode);
  return finish(hipThreadExchangeStreamCaptureMode_name);
}

DRIVER_FUNCTION(cuGetErrorString, hipDrvGetErrorString, int code, const char** words) {
  static thread_local std::string text;
  text = "fake error " + std::to_string(code);
  *words = text.c_str();
  return finish(hipDrvGetErrorString_name);
}

namespace {

// Device memory of this driver is memory like any other.
int copy_one(const char* name, void* to, const void* from, size_t bytes) {
  const int code = finish(name);
  if (code == 0) {
    std::memmove(to, from, bytes);
    ++copied;
  }
  return code;
}

// Batches take neither the legacy default stream nor one that is captured.
[[maybe_unused]] int copy_batch(const char* name, void** to, void** from, size_t* bytes, size_t count, void* stream,
                                bool well_formed) {
  const bool legacy = reinterpret_cast<uintptr_t>(stream) < 2;
  const int code = finish(name, legacy || capturing || count == 0 || !well_formed);
  for (size_t i = 0; code == 0 && i < count; ++i) std::memmove(to[i], from[i], bytes[i]);
  if (code == 0) copied += count;
  if (code == 0 && count > largest_batch) largest_batch = count;
  return code;
}

}  // namespace

#ifdef FAKE_HIP

extern "C" {
int hipMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void*) {
  return copy_one(kind == 4 ? "hipMemcpyAsync" : "a kind that is no default", to, from, bytes);
}
#ifndef FAKE_WITHOUT_BATCHES
int hipMemcpyBatchAsync(void** to, void** from, size_t* bytes, size_t count, void*, size_t*, size_t, size_t* failed,
                        void* stream) {
  const bool well_formed = count <= 8192 && failed != nullptr;
  return copy_batch("hipMemcpyBatchAsync", to, from, bytes, count, stream, well_formed);
}
#endif
int hipGetDevice(int* device) {
  *device = current_devices.back();
  return finish("hipGetDevice");
}
int hipSetDevice(int device) {
  const int code = finish("hipSetDevice");
  if (code == 0) current_devices.back() = device;
  return code;
}
int hipGetLastError() {
  const int code = last_error;
  last_error = 0;
  return code;
}
int hipGetDevicePropertiesR0600(char* properties, int device) {
  std::strcpy(properties, "gfx in a name is no arch");
  std::strcpy(properties + 1160, device == 0 ? "gfx942:sramecc+:xnack-" : "gfx950");
  return finish("hipGetDevicePropertiesR0600");
}
int hipHostGetDevicePointer(void** device, uintptr_t host, unsigned) {
  const Mapping* mapping = find(host, &Mapping::host);
  if (mapping != nullptr) *device = reinterpret_cast<void*>(mapping->device + (host - mapping->host));
  return finish("hipHostGetDevicePointer", mapping == nullptr);
}
int hipMemGetAddressRange(void** start, size_t* size, void* address) {
  const Mapping* mapping = find(reinterpret_cast<uintptr_t>(address), &Mapping::device);
  if (mapping != nullptr) {
    *start = reinterpret_cast<void*>(mapping->device);
    *size = mapping->bytes;
  }
  return finish("hipMemGetAddressRange", mapping == nullptr);
}
}

#else

extern "C" {
int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t bytes, void*) {
  return copy_one("cuMemcpyAsync", reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
}
#ifndef FAKE_WITHOUT_BATCHES
// The first of the attributes is the order in which sources are read; 1 is that of the stream.
int cuMemcpyBatchAsync(void** to, void** from, size_t* bytes, size_t count, int* attributes, size_t* first,
                       size_t groups, size_t* failed, void* stream) {
  const bool well_formed = *attributes == 1 && *first == 0 && groups == 1 && failed != nullptr;
  return copy_batch("cuMemcpyBatchAsync", to, from, bytes, count, stream, well_formed);
}
#ifndef FAKE_CUDA_12
int cuMemcpyBatchAsync_v2(void** to, void** from, size_t* bytes, size_t count, int* attributes, size_t* first,
                          size_t groups, void* stream) {
  const bool well_formed = *attributes == 1 && *first == 0 && groups == 1;
  return copy_batch("cuMemcpyBatchAsync_v2", to, from, bytes, count, stream, well_formed);
}
#endif
#endif
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = handle(device);
  return finish("cuDevicePrimaryCtxRetain");
}
int cuCtxGetCurrent(void** context) {
  *context = current_devices.back() < 0 ? nullptr : handle(current_devices.back());
  return finish("cuCtxGetCurrent");
}
int cuCtxPushCurrent_v2(void* context) {
  const int code = finish("cuCtxPushCurrent_v2");
  if (code == 0) current_devices.push_back(device_of(context));
  return code;
}
int cuCtxPopCurrent_v2(void** context) {
  *context = handle(current_devices.back());
  current_devices.pop_back();
  return finish("cuCtxPopCurrent_v2");
}
int cuFuncSetAttribute(void*, int attribute, int value) {
  return finish("cuFuncSetAttribute", attribute != 8 || value != shared_bytes);
}
int cuPointerGetAttributes(unsigned count, int* attributes, void** values, uintptr_t address) {
  const Mapping* mapping = find(address, &Mapping::host);
  for (unsigned i = 0; mapping != nullptr && i < count; ++i) {
    if (attributes[i] == 2) *static_cast<unsigned*>(values[i]) = 1;  // host memory
    if (attributes[i] == 3) *static_cast<uintptr_t*>(values[i]) = mapping->device + (address - mapping->host);
    if (attributes[i] == 11) *static_cast<uintptr_t*>(values[i]) = mapping->device;
    if (attributes[i] == 12) *static_cast<size_t*>(values[i]) = mapping->bytes;
  }
  return finish("cuPointerGetAttributes");
}
}

#endif
