// A driver library without a GPU: the functions that hisparse binds, as CUDA (libcuda) or, with FAKE_HIP, as
// HIP (libamdhip64). Tests load it in the driver's place, set it up through the fake_* functions, and read
// what was called.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../kernels/common/content_check.h"

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

constexpr int kEveryDevice = -1;

struct Mapping {
  uintptr_t host, device;
  size_t bytes;
  int on = kEveryDevice;
};

struct Failure {
  int code;
  int on;
};

struct DriverCall {
  std::string name;
  int current;
};

struct Launch {
  unsigned blocks, parts, threads, shared_bytes;
  int device;
  void* stream;
  hisparse::SwapInParams params;
};

std::mutex mutex;
std::vector<DriverCall> calls;
std::map<std::string, Failure> failures;
std::vector<Mapping> mappings, registered;
std::vector<uintptr_t> unregistered;
size_t register_limit = SIZE_MAX;
Launch last{};
std::map<int, Launch> last_on;
std::map<int, int> shared_on;  // where it is not shared_bytes
hisparse::TransferParams last_transfer{};
hisparse::PlannedCopyParams last_planned{};
hisparse::LayerCopyParams last_layers{};
hisparse::KernelId last_kernel{};
size_t copied = 0, largest_batch = 0;
int checks = 0;
int devices = 2, shared_bytes = 65536, capturing = 0, last_error = 0;
thread_local int capture_mode = 0;
thread_local std::vector<int> current_devices{0};

constexpr int kKernelStep = 1000;

// Contexts, modules and kernels stand for a device: one more than its index, so that none is null; each kernel
// is kKernelStep further on than the one before it in the list.
void* handle(int device) { return reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1); }
int device_of(const void* handle) { return static_cast<int>(reinterpret_cast<intptr_t>(handle)) - 1; }

std::string hanging;  // a function that does not come back for a while
int hang_seconds = 0;

int finish(const char* name, int code = 0) {
  if (name == hanging) std::this_thread::sleep_for(std::chrono::seconds(hang_seconds));
  const std::lock_guard<std::mutex> lock(mutex);
  const int current = current_devices.back();
  calls.push_back({name, current});
  const auto found = failures.find(name);
  if (found != failures.end() && (found->second.on == kEveryDevice || found->second.on == current))
    code = found->second.code;
  if (code != 0) last_error = code;
  return code;
}

// What a capturing thread may not do unless it is in relaxed mode.
int finish_unsafe(const char* name, int code = 0) {
  return finish(name, capturing && capture_mode != 2 ? 900 : code);
}

const Mapping* find(uintptr_t address, uintptr_t Mapping::* side) {
  for (const Mapping& mapping : mappings) {
    const bool is_here = mapping.on == kEveryDevice || mapping.on == current_devices.back();
    if (is_here && address - mapping.*side < mapping.bytes) return &mapping;
  }
  return nullptr;
}

int shared_of(int device) { return shared_on.count(device) != 0 ? shared_on[device] : shared_bytes; }
// The checks of contents find what they are told to, once.
int fault = -1;
uint64_t fault_place = 0;

void find_fault(uint64_t* first_faults) {
  ++checks;
  for (int kind = 0; kind < hisparse::kFaults; ++kind)
    if (first_faults[kind] != hisparse::kNoFault) last_error = 999;  // the report was not cleared
  if (fault >= 0) first_faults[fault] = fault_place;
  fault = -1;
}

}  // namespace

#define DRIVER_FUNCTION(cuda, hip, ...)                       \
  constexpr const char* hip##_name = STRING(NAME(cuda, hip)); \
  extern "C" int NAME(cuda, hip)(__VA_ARGS__)

extern "C" {
void fake_fail_on(const char* name, int code, int device) {
  if (code != 0) {
    failures[name] = {code, device};
  } else {
    failures.erase(name);
  }
}
void fake_fail(const char* name, int code) { fake_fail_on(name, code, kEveryDevice); }
void fake_hang(const char* name, int seconds) {
  hang_seconds = seconds;
  hanging = name;
}
void fake_setup(int device_count, int shared) {
  devices = device_count;
  shared_bytes = shared;
}
void fake_capture(int on) { capturing = on; }
void fake_set_shared_on(int device, int shared) { shared_on[device] = shared; }
void fake_map(uintptr_t host, uintptr_t device, size_t bytes) { mappings.push_back({host, device, bytes}); }
void fake_map_on(uintptr_t host, uintptr_t device, size_t bytes, int on) {
  mappings.push_back({host, device, bytes, on});
}
void fake_register_limit(size_t bytes) { register_limit = bytes; }
size_t fake_registered(size_t index) { return index < registered.size() ? registered[index].bytes : 0; }
uintptr_t fake_unregistered(size_t index) { return index < unregistered.size() ? unregistered[index] : 0; }
void fake_unmap_all() { mappings.clear(); }
void fake_set_current(int device) { current_devices.back() = device; }
void fake_fault(int kind, uint64_t place) {
  fault = kind;
  fault_place = place;
}
int fake_checks() { return checks; }
int fake_current() { return current_devices.back(); }
int fake_last_error() { return last_error; }
const Launch* fake_last_launch() { return &last; }
const Launch* fake_last_launch_on(int device) { return &last_on[device]; }
uint32_t* fake_arrivals() { return last.params.arrivals; }
uintptr_t fake_host_cache() { return reinterpret_cast<uintptr_t>(last.params.host_cache.base); }
const char* fake_kernel() { return hisparse::kKernelNames[static_cast<int>(last_kernel)]; }
uintptr_t fake_host_values() { return reinterpret_cast<uintptr_t>(last.params.host_values); }
int fake_word_bytes() { return last.params.copy.word_bytes; }
uintptr_t fake_planned_host_cache() { return reinterpret_cast<uintptr_t>(last_planned.host_cache.base); }
int fake_rows_per_group() { return last_planned.rows_per_group; }
int fake_layer_step() { return last_layers.layer_step; }
uintptr_t fake_transfer_src(int side) { return reinterpret_cast<uintptr_t>(last_transfer.src.pools[side]); }
uintptr_t fake_transfer_dst(int side) { return reinterpret_cast<uintptr_t>(last_transfer.dst.pools[side]); }
int fake_parts_per_tile() { return static_cast<int>(last_transfer.parts_per_tile); }
int fake_variant() { return static_cast<int>(last_kernel) - static_cast<int>(hisparse::KernelId::kCopyItems); }
size_t fake_copied() { return copied; }
size_t fake_largest_batch() { return largest_batch; }
int fake_count_on(const char* name, int device) {
  const std::lock_guard<std::mutex> lock(mutex);
  int count = 0;
  for (const DriverCall& call : calls)
    count += call.name == name && (device == kEveryDevice || call.current == device);
  return count;
}
int fake_count(const char* name) { return fake_count_on(name, kEveryDevice); }
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
                                  {kSharedAttribute, shared_of(device)},
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
  int id = 0;
  while (std::strcmp(name, hisparse::kKernelNames[id]) != 0) ++id;
  *kernel = handle(device_of(module) + id * kKernelStep);
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
  const int device = device_of(kernel) % kKernelStep;
  const int code = finish(hipModuleLaunchKernel_name, device == current_devices.back() ? 0 : 201);
  const std::lock_guard<std::mutex> lock(mutex);
  if (code == 0) {
    last = {grid_x, grid_y, block_x, shared, device, stream, {}};
    using hisparse::KernelId;
    last_kernel = static_cast<KernelId>(device_of(kernel) / kKernelStep);
    if (last_kernel < KernelId::kCopyItems) std::memcpy(&last.params, parameters[0], sizeof(last.params));
    last_on[device] = last;
    if (last_kernel == KernelId::kTransfer)
      std::memcpy(&last_transfer, parameters[0], sizeof(last_transfer));
    if (last_kernel == KernelId::kCopyPlanned || last_kernel == KernelId::kCopyPlannedDsv4)
      std::memcpy(&last_planned, parameters[0], sizeof(last_planned));
    if (last_kernel == KernelId::kCopyLayersDsv4)
      std::memcpy(&last_layers, parameters[0], sizeof(last_layers));
    if (last_kernel == KernelId::kCheckSwapIn)
      find_fault(static_cast<const hisparse::SwapInCheckParams*>(parameters[0])->first_faults);
    if (last_kernel == KernelId::kCheckIndices)
      find_fault(static_cast<const hisparse::IndexCheckParams*>(parameters[0])->first_faults);
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
  // Counters, which are zeroed, may be reserved beside a capture, which the default stream would break.
  return finish(hipMemsetD8Async_name, value == 0 && stream == nullptr);
}

DRIVER_FUNCTION(cuMemHostRegister_v2, hipHostRegister, void* memory, size_t bytes, unsigned flags) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  constexpr uintptr_t kPage = 4096;
  int code = flags != 3 ? 1 : bytes > register_limit ? 2 : 0;
  for (const Mapping& other : registered) {
    const bool shares_page = address / kPage <= (other.host + other.bytes - 1) / kPage &&
                             other.host / kPage <= (address + bytes - 1) / kPage;
    if (shares_page) code = 712;
  }
  code = finish_unsafe(hipHostRegister_name, code);
  if (code != 0) return code;
  registered.push_back({address, address, bytes});
  mappings.push_back({address, address + (uintptr_t{1} << 40), bytes});
  return 0;
}

DRIVER_FUNCTION(cuMemHostUnregister, hipHostUnregister, void* memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const auto is_it = [&](const Mapping& piece) { return piece.host == address; };
  const auto found = std::find_if(registered.begin(), registered.end(), is_it);
  const int code = finish(hipHostUnregister_name, found == registered.end() ? 713 : 0);
  if (code != 0) return code;
  unregistered.push_back(address);
  registered.erase(found);
  mappings.erase(std::find_if(mappings.begin(), mappings.end(), is_it));
  return 0;
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
  return finish("cuFuncSetAttribute", attribute != 8 || value != shared_of(current_devices.back()));
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
