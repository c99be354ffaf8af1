// What the CUDA driver and the HIP runtime have in common: the same functions by other names.
// cuda_runtime.cpp and hip_runtime.cpp hold the names and the differences.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arrival_counters.h"
#include "runtime.h"
#include "shared_library.h"

namespace hisparse::host {

// A function of the driver's library. All return 0 or an error code; handles and device addresses are
// pointer-sized.
template <typename... Arguments>
struct DriverFunction {
  const char* name = nullptr;
  int (*call)(Arguments...) = nullptr;

  void bind(const SharedLibrary& library, const char* symbol) {
    name = symbol;
    call = reinterpret_cast<int (*)(Arguments...)>(library.required_symbol(symbol));
  }
  void bind_if_there(const SharedLibrary& library, const char* symbol) {
    name = symbol;
    call = reinterpret_cast<int (*)(Arguments...)>(library.symbol(symbol));
  }
};

struct DriverFunctions {
  DriverFunction<unsigned> initialize;  // (flags)
  DriverFunction<int*> get_version;     // not in every stand-in for a driver
  DriverFunction<int*> count_devices;
  DriverFunction<char*, int, int> get_device_name;      // (name, size, device)
  DriverFunction<int*, int, int> get_device_attribute;  // (value, attribute, device)
  DriverFunction<void**, const void*> load_module;
  DriverFunction<void**, void*, const char*> get_kernel;  // (kernel, module, name)
  DriverFunction<void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                 void**>
      launch_kernel;  // (kernel, grid, block, shared bytes, stream, parameters, extra)
  DriverFunction<void**, size_t> allocate;
  DriverFunction<void*, unsigned char, size_t, void*> fill;  // (memory, byte, count, stream)
  DriverFunction<void*, size_t, unsigned> register_host;     // (memory, bytes, flags)
  DriverFunction<void*> unregister_host;
  DriverFunction<void**, unsigned> create_stream;  // (stream, flags)
  DriverFunction<void*> synchronize_stream;
  DriverFunction<void*> destroy_stream;
  DriverFunction<void*, int*> is_capturing;
  DriverFunction<void*, unsigned long long*> get_stream_id;  // not in older drivers
  DriverFunction<int*> exchange_capture_mode;
  DriverFunction<int, const char**> get_error_text;
};

// Numbers by which a driver knows the properties of a device.
struct DeviceAttributes {
  int warp_size, max_threads_per_block, multiprocessors, shared_memory_bytes;
};

// The device code in this extension; empty where it was built without.
struct DeviceImage {
  const unsigned char* begin;
  const unsigned char* end;
  const char* archs;
};

class GpuRuntime : public Runtime {
 public:
  GpuRuntime(const char* label, DeviceImage image, DeviceAttributes attributes)
      : label_(label), image_(image), attributes_(attributes) {}

  std::optional<DriverInfo> driver() final;
  int device_count() final;
  const DeviceInfo& device(int index) final;
  void launch(KernelId kernel, const void* params, size_t param_bytes, const LaunchShape& shape, int device,
              void* stream) final;
  std::optional<uintptr_t> device_address(const void* host, size_t bytes, int device) final;
  void register_memory(void* host, size_t bytes, int device) final;
  void unregister_memory(void* host, int device) final;
  bool captures(int device, void* stream) final;
  void copy(CopyList& copies, int device, void* stream) final;
  void read(void* to, const void* from, size_t bytes, int device, void* stream) final;
  void inspect(KernelId kernel, const void* params, size_t param_bytes, uint64_t*& report, uint64_t* result,
               size_t words, const LaunchShape& shape, int device, void* stream) final;
  uint32_t* arrival_counters(int batch, int device, void* stream) final;

 protected:
  static constexpr int kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED, hipErrorNotSupported

  // Host memory as kernels reach it: address 0 where they don't, bytes 0 where the allocation's end is not
  // known.
  struct MappedMemory {
    uintptr_t address = 0;
    size_t bytes = 0;
  };

  virtual std::vector<std::string> library_candidates() = 0;
  virtual void bind(const SharedLibrary& library, DriverFunctions& functions) = 0;
  virtual std::string version_text(int number) = 0;
  virtual std::string arch_of(int device) = 0;
  virtual void prepare(int device) = 0;  // once per device, before it is entered
  virtual void allow_shared_memory(void* kernel, const DeviceInfo& info) = 0;
  virtual MappedMemory mapped_memory(uintptr_t host) = 0;
  // Makes a device the calling thread's current one, unless it is; what enter returns says how to go back.
  virtual int enter(int device) = 0;
  virtual void leave(int entered) = 0;
  virtual void clear_error() {}
  virtual void copy_one(void* to, const void* from, size_t bytes, void* stream) = 0;
  // The driver's error code; kNotSupported where it has no batched copies.
  virtual int copy_batch(void** to, void** from, size_t* bytes, size_t count, void* stream) = 0;

  template <typename... Parameters, typename... Arguments>
  void check(const DriverFunction<Parameters...>& function, Arguments... arguments) {
    if (const int code = function.call(arguments...)) fail(function.name, code);
  }
  [[noreturn]] void fail(const char* function, int code);
  int attribute(int number, int device);

 private:
  struct DeviceState {
    DeviceInfo info;
    std::atomic<bool> is_ready{false};
    void* module = nullptr;
    void* kernels[static_cast<int>(KernelId::kCount)] = {};
    ArrivalCounters counters;
    std::mutex report_mutex;
    void* report = nullptr;  // one inspection at a time writes there
  };
  static constexpr size_t kReportBytes = 4096;
  class CurrentDevice;
  class RelaxedCapture;

  void load_driver();
  bool is_captured(void* stream);
  DeviceState& state(int index);
  DeviceState& ready(int index);
  void load_module(DeviceState& state, int index);
  void reserve_counters(DeviceState& state);
  std::string error_text(const char* function, int code);

  const char* const label_;  // "CUDA", "ROCm"
  const DeviceImage image_;
  const DeviceAttributes attributes_;
  DriverFunctions functions_;
  std::mutex mutex_;
  std::atomic<bool> is_loaded_{false};
  int forks_before_ = 0;
  DriverInfo driver_;
  std::vector<std::unique_ptr<DeviceState>> devices_;
};

}  // namespace hisparse::host
