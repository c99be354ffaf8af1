// The CUDA target, through the driver API: https://docs.nvidia.com/cuda/cuda-driver-api
#include <cstdlib>

#include "device_images.h"
#include "device_runtimes.h"
#include "errors.h"
#include "gpu_runtime.h"

namespace hisparse::host {
namespace {

constexpr int kInvalidValue = 1;
// CUdevice_attribute
constexpr DeviceAttributes kAttributes{/*warp_size=*/10, /*max_threads_per_block=*/1, /*multiprocessors=*/16,
                                       /*shared_memory_bytes=*/97};  // with opt-in
constexpr int kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76;
// CUfunction_attribute
constexpr int kMaxDynamicSharedBytes = 8;
// CUpointer_attribute
enum PointerAttribute : int { kMemoryType = 2, kDevicePointer = 3, kRangeStart = 11, kRangeSize = 12 };

class CudaRuntime final : public GpuRuntime {
 public:
  CudaRuntime()
      : GpuRuntime("CUDA", {hisparse_cuda_image, hisparse_cuda_image_end, HISPARSE_CUDA_ARCHS}, kAttributes) {
  }

  const char* target() const override { return "cuda"; }

 protected:
  std::vector<std::string> library_candidates() override {
    const char* pinned = std::getenv("HISPARSE_CUDA_LIBRARY");
    if (pinned != nullptr && *pinned != '\0') return {pinned};
    return {"libcuda.so.1"};
  }

  void bind(const SharedLibrary& library, DriverFunctions& functions) override {
    functions.initialize.bind(library, "cuInit");
    functions.get_version.bind_if_there(library, "cuDriverGetVersion");
    functions.count_devices.bind(library, "cuDeviceGetCount");
    functions.get_device_name.bind(library, "cuDeviceGetName");
    functions.get_device_attribute.bind(library, "cuDeviceGetAttribute");
    functions.load_module.bind(library, "cuModuleLoadData");
    functions.get_kernel.bind(library, "cuModuleGetFunction");
    functions.launch_kernel.bind(library, "cuLaunchKernel");
    functions.allocate.bind(library, "cuMemAlloc_v2");
    functions.fill.bind(library, "cuMemsetD8Async");
    functions.register_host.bind(library, "cuMemHostRegister_v2");
    functions.unregister_host.bind(library, "cuMemHostUnregister");
    functions.create_stream.bind(library, "cuStreamCreate");
    functions.synchronize_stream.bind(library, "cuStreamSynchronize");
    functions.destroy_stream.bind(library, "cuStreamDestroy_v2");
    functions.is_capturing.bind(library, "cuStreamIsCapturing");
    functions.get_stream_id.bind_if_there(library, "cuStreamGetId");
    functions.exchange_capture_mode.bind(library, "cuThreadExchangeStreamCaptureMode");
    functions.get_error_text.bind(library, "cuGetErrorString");
    retain_context_.bind(library, "cuDevicePrimaryCtxRetain");
    get_context_.bind(library, "cuCtxGetCurrent");
    push_context_.bind(library, "cuCtxPushCurrent_v2");
    pop_context_.bind(library, "cuCtxPopCurrent_v2");
    set_kernel_attribute_.bind(library, "cuFuncSetAttribute");
    get_pointer_attributes_.bind(library, "cuPointerGetAttributes");
    copy_.bind(library, "cuMemcpyAsync");
    copy_batch_.bind_if_there(library, "cuMemcpyBatchAsync_v2");
    copy_batch_12_.bind_if_there(library, "cuMemcpyBatchAsync");
  }

  std::string version_text(int number) override { return text(number / 1000, ".", number % 1000 / 10); }

  std::string arch_of(int device) override {
    return text("sm_", attribute(kComputeCapabilityMajor, device),
                attribute(kComputeCapabilityMinor, device));
  }

  // The context that the CUDA runtime, and so every framework, uses; kept for the rest of the process.
  void prepare(int device) override {
    if (contexts_.empty()) contexts_.resize(device_count());
    if (contexts_[device] != nullptr) return;
    void* context = nullptr;
    check(retain_context_, &context, device);
    contexts_[device] = context;
  }

  void allow_shared_memory(void* kernel, const DeviceInfo& info) override {
    check(set_kernel_attribute_, kernel, kMaxDynamicSharedBytes, static_cast<int>(info.shared_memory_bytes));
  }

  MappedMemory mapped_memory(uintptr_t host) override {
    unsigned memory_type = 0;
    uintptr_t address = 0, start = 0;
    size_t size = 0;
    PointerAttribute attributes[] = {kMemoryType, kDevicePointer, kRangeStart, kRangeSize};
    void* values[] = {&memory_type, &address, &start, &size};
    const int code = get_pointer_attributes_.call(4, attributes, values, host);
    if (code != 0 && code != kInvalidValue) fail(get_pointer_attributes_.name, code);
    // Pageable memory has no type, even where the device could reach it through the host's page tables.
    if (code != 0 || memory_type == 0) return {};
    const bool range_known = start <= address && address - start < size;
    return {address, range_known ? size - (address - start) : 0};
  }

  void copy_one(void* to, const void* from, size_t bytes, void* stream) override {
    check(copy_, reinterpret_cast<uintptr_t>(to), reinterpret_cast<uintptr_t>(from), bytes, stream);
  }

  int copy_batch(void** to, void** from, size_t* bytes, size_t count, void* stream) override {
    CopyAttributes attributes{kInStreamOrder, {}, 0};
    size_t first = 0, failed = 0;
    if (copy_batch_.call != nullptr)
      return copy_batch_.call(to, from, bytes, count, &attributes, &first, 1, stream);
    if (copy_batch_12_.call != nullptr)
      return copy_batch_12_.call(to, from, bytes, count, &attributes, &first, 1, &failed, stream);
    return kNotSupported;
  }

  int enter(int device) override {
    void* current = nullptr;
    check(get_context_, &current);
    if (current == contexts_[device]) return 0;
    check(push_context_, contexts_[device]);
    return 1;
  }

  void leave(int pushed) override {
    void* popped = nullptr;
    if (pushed != 0) pop_context_.call(&popped);
  }

 private:
  // CUmemcpyAttributes: source access order, hints where source and destination are, flags
  struct CopyAttributes {
    int source_order;
    int hints[2][2];
    unsigned flags;
  };
  static constexpr int kInStreamOrder = 1;  // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

  std::vector<void*> contexts_;
  DriverFunction<void**, int> retain_context_;  // (context, device)
  DriverFunction<void**> get_context_;
  DriverFunction<void*> push_context_;
  DriverFunction<void**> pop_context_;
  DriverFunction<void*, int, int> set_kernel_attribute_;  // (kernel, attribute, value)
  DriverFunction<unsigned, PointerAttribute*, void**, uintptr_t> get_pointer_attributes_;
  DriverFunction<uintptr_t, uintptr_t, size_t, void*> copy_;  // (to, from, bytes, stream)
  // (to, from, bytes, count, attributes, first copy of each, number of attributes, [failed copy,] stream):
  // CUDA 13, 12.8
  DriverFunction<void**, void**, size_t*, size_t, CopyAttributes*, size_t*, size_t, void*> copy_batch_;
  DriverFunction<void**, void**, size_t*, size_t, CopyAttributes*, size_t*, size_t, size_t*, void*>
      copy_batch_12_;
};

}  // namespace

Runtime& cuda_runtime() {
  static auto* const runtime = new CudaRuntime();  // outlives threads that are still launching at exit
  return *runtime;
}

}  // namespace hisparse::host
