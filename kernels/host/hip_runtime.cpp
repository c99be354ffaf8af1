// The ROCm target, through the HIP runtime: https://rocm.docs.amd.com/projects/HIP
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "device_images.h"
#include "device_runtimes.h"
#include "errors.h"
#include "gpu_runtime.h"

namespace hisparse::host {
namespace {

constexpr int kInvalidValue = 1;
// hipDeviceAttribute_t
constexpr DeviceAttributes kAttributes{/*warp_size=*/87, /*max_threads_per_block=*/56, /*multiprocessors=*/63,
                                       /*shared_memory_bytes=*/74};

class HipRuntime final : public GpuRuntime {
 public:
  HipRuntime()
      : GpuRuntime("ROCm", {hisparse_rocm_image, hisparse_rocm_image_end, HISPARSE_ROCM_ARCHS}, kAttributes) {
  }

  const char* target() const override { return "rocm"; }

 protected:
  // Two HIP runtimes in one process don't know each other's streams: the one that a framework has loaded goes
  // first.
  std::vector<std::string> library_candidates() override {
    const char* pinned = std::getenv("HISPARSE_HIP_LIBRARY");
    if (pinned != nullptr && *pinned != '\0') return {pinned};
    std::vector<std::string> candidates;
    const std::string mapped = mapped_library("libamdhip64.so");
    if (!mapped.empty()) candidates.push_back(mapped);
    // The libraries of the rocm_sdk package, where it is installed beside this one.
    const std::string sdk = package_folder() + "/_rocm_sdk_core/lib/";
    for (const char* name : {"libamdhip64.so.7", "libamdhip64.so.6"}) {
      if (std::filesystem::exists(sdk + name)) candidates.push_back(sdk + name);
    }
    for (const char* name : {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"})
      candidates.push_back(name);
    return candidates;
  }

  void bind(const SharedLibrary& library, DriverFunctions& functions) override {
    functions.initialize.bind(library, "hipInit");
    functions.get_version.bind_if_there(library, "hipRuntimeGetVersion");
    functions.count_devices.bind(library, "hipGetDeviceCount");
    functions.get_device_name.bind(library, "hipDeviceGetName");
    functions.get_device_attribute.bind(library, "hipDeviceGetAttribute");
    functions.load_module.bind(library, "hipModuleLoadData");
    functions.get_kernel.bind(library, "hipModuleGetFunction");
    functions.launch_kernel.bind(library, "hipModuleLaunchKernel");
    functions.allocate.bind(library, "hipMalloc");
    functions.fill.bind(library, "hipMemsetD8Async");
    functions.register_host.bind(library, "hipHostRegister");
    functions.unregister_host.bind(library, "hipHostUnregister");
    functions.create_stream.bind(library, "hipStreamCreateWithFlags");
    functions.synchronize_stream.bind(library, "hipStreamSynchronize");
    functions.destroy_stream.bind(library, "hipStreamDestroy");
    functions.is_capturing.bind(library, "hipStreamIsCapturing");
    functions.get_stream_id.bind_if_there(library, "hipStreamGetId");
    functions.exchange_capture_mode.bind(library, "hipThreadExchangeStreamCaptureMode");
    functions.get_error_text.bind(library, "hipDrvGetErrorString");
    get_device_.bind(library, "hipGetDevice");
    set_device_.bind(library, "hipSetDevice");
    get_last_error_.bind(library, "hipGetLastError");
    get_properties_.bind(library, "hipGetDevicePropertiesR0600");
    get_device_pointer_.bind(library, "hipHostGetDevicePointer");
    get_address_range_.bind(library, "hipMemGetAddressRange");
    copy_.bind(library, "hipMemcpyAsync");
    copy_batch_.bind_if_there(library, "hipMemcpyBatchAsync");
  }

  std::string version_text(int number) override {
    return text(number / 10000000, ".", number / 100000 % 100, ".", number % 100000);
  }

  // The struct of properties grows with HIP's releases: the arch is looked for by what it looks like, behind
  // the name, which is first and 256 bytes long.
  std::string arch_of(int device) override {
    constexpr size_t kNameBytes = 256;
    char properties[8192] = {};
    check(get_properties_, static_cast<void*>(properties), device);
    const auto* found = static_cast<const char*>(
        memmem(properties + kNameBytes, sizeof(properties) - kNameBytes - 1, "gfx", std::strlen("gfx")));
    if (found == nullptr) return "an unknown arch";
    return std::string(found, std::strcspn(found, ":"));
  }

  void prepare(int) override {}
  void allow_shared_memory(void*, const DeviceInfo&) override {}  // HIP grants all there is

  MappedMemory mapped_memory(uintptr_t host) override {
    void* address = nullptr;
    const int code = get_device_pointer_.call(&address, host, 0);
    if (code != 0 && code != kInvalidValue) fail(get_device_pointer_.name, code);
    if (code != 0 || address == nullptr) {
      clear_error();
      return {};
    }
    void* start = nullptr;
    size_t size = 0;
    if (get_address_range_.call(&start, &size, address) != 0) {
      clear_error();
      return {reinterpret_cast<uintptr_t>(address), 0};
    }
    const size_t offset = static_cast<char*>(address) - static_cast<char*>(start);
    return {reinterpret_cast<uintptr_t>(address), offset < size ? size - offset : 0};
  }

  void copy_one(void* to, const void* from, size_t bytes, void* stream) override {
    constexpr int kByAddress = 4;  // hipMemcpyDefault
    check(copy_, to, from, bytes, kByAddress, stream);
  }

  // HIP has no attributes of copies yet.
  int copy_batch(void** to, void** from, size_t* bytes, size_t count, void* stream) override {
    size_t failed = 0;
    if (copy_batch_.call == nullptr) return kNotSupported;
    return copy_batch_.call(to, from, bytes, count, nullptr, nullptr, 0, &failed, stream);
  }

  int enter(int device) override {
    int current = 0;
    check(get_device_, &current);
    if (current == device) return kUnchanged;
    check(set_device_, device);
    return current;
  }

  void leave(int previous) override {
    if (previous != kUnchanged && set_device_.call(previous) != 0) clear_error();
  }

  // HIP keeps the last error of a thread until it is asked for: the framework must not find ours.
  void clear_error() override { get_last_error_.call(); }

 private:
  static constexpr int kUnchanged = -1;

  DriverFunction<int*> get_device_;
  DriverFunction<int> set_device_;
  DriverFunction<> get_last_error_;
  DriverFunction<void*, int> get_properties_;
  DriverFunction<void**, uintptr_t, unsigned> get_device_pointer_;  // (device address, host address, flags)
  DriverFunction<void**, size_t*, void*> get_address_range_;        // (start, size, address)
  DriverFunction<void*, const void*, size_t, int, void*> copy_;     // (to, from, bytes, kind, stream)
  // (to, from, bytes, count, attributes, first copy of each, number of attributes, failed copy, stream)
  DriverFunction<void**, void**, size_t*, size_t, void*, size_t*, size_t, size_t*, void*> copy_batch_;
};

}  // namespace

Runtime& hip_runtime() {
  static auto* const runtime = new HipRuntime();  // outlives threads that are still launching at exit
  return *runtime;
}

}  // namespace hisparse::host
