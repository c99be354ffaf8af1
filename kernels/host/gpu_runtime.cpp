#include "gpu_runtime.h"

#include <pthread.h>

#include <algorithm>
#include <functional>
#include <thread>

#include "errors.h"

namespace hisparse::host {
namespace {

constexpr int kNoDevice = 100;           // CUDA_ERROR_NO_DEVICE, hipErrorNoDevice
constexpr int kAlreadyRegistered = 712;  // CUDA_ERROR_HOST_MEMORY_..., hipErrorHostMemoryAlreadyRegistered
constexpr unsigned kPortableAndMapped = 1 | 2;           // the same flags in both
constexpr unsigned kNonBlocking = 1;                     // CU_STREAM_NON_BLOCKING, hipStreamNonBlocking
constexpr uintptr_t kNullStream = 0, kLegacyStream = 1;  // CU_STREAM_LEGACY, hipStreamLegacy
constexpr size_t kMaxBatch = 8192;                       // HIP's limit
constexpr int kCaptureModeRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED, hipStreamCaptureModeRelaxed

// How many forks lie between this process and the first one that used a GPU here.
std::atomic<int> forks{0};

void count_forks() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { ++forks; }); });
}

}  // namespace

class GpuRuntime::CurrentDevice {
 public:
  CurrentDevice(GpuRuntime& runtime, int device) : runtime_(runtime), entered_(runtime.enter(device)) {}
  ~CurrentDevice() { runtime_.leave(entered_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  GpuRuntime& runtime_;
  const int entered_;
};

// Loading and allocating are forbidden to a thread while a stream is captured, unless it says that it knows.
class GpuRuntime::RelaxedCapture {
 public:
  explicit RelaxedCapture(GpuRuntime& runtime) : runtime_(runtime) {
    runtime_.check(runtime_.functions_.exchange_capture_mode, &mode_);
  }
  ~RelaxedCapture() {
    if (runtime_.functions_.exchange_capture_mode.call(&mode_) != 0) runtime_.clear_error();
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  GpuRuntime& runtime_;
  int mode_ = kCaptureModeRelaxed;
};

std::string GpuRuntime::error_text(const char* function, int code) {
  const char* words = nullptr;
  if (functions_.get_error_text.call(code, &words) != 0 || words == nullptr) words = "unknown error";
  clear_error();
  return text(function, " failed with error ", code, " (", words, ")");
}

void GpuRuntime::fail(const char* function, int code) {
  throw std::runtime_error(error_text(function, code));
}

int GpuRuntime::attribute(int number, int device) {
  int value = 0;
  check(functions_.get_device_attribute, &value, number, device);
  return value;
}

void GpuRuntime::load_driver() {
  if (is_loaded_.load(std::memory_order_acquire)) {
    if (forks != forks_before_) {
      throw std::runtime_error(text(label_,
                                    " was in use before this process was forked, and does not survive that: "
                                    "start processes with the spawn method, or fork before the first call"));
    }
    return;
  }
  if (image_.begin == image_.end) throw NoDevice(text("hisparse was built without the ", label_, " target"));
  count_forks();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_loaded_.load(std::memory_order_relaxed)) return;

  SharedLibrary library;
  try {
    library = SharedLibrary::open(library_candidates());
  } catch (const std::runtime_error& error) {
    throw NoDevice(text("no ", label_, " driver: ", error.what()));
  }
  bind(library, functions_);
  driver_.library = library.path();
  const int code = functions_.initialize.call(0);
  int count = 0;
  if (code != 0 && code != kNoDevice) fail(functions_.initialize.name, code);
  if (code == 0) {
    const int count_code = functions_.count_devices.call(&count);
    if (count_code != 0 && count_code != kNoDevice) fail(functions_.count_devices.name, count_code);
  }
  if (count == 0) {
    clear_error();
    throw NoDevice(text("no ", label_, " device: the driver reports none"));
  }

  std::vector<std::unique_ptr<DeviceState>> devices;
  for (int index = 0; index < count; ++index) {
    devices.push_back(std::make_unique<DeviceState>());
    DeviceInfo& info = devices.back()->info;
    char name[256] = {};
    check(functions_.get_device_name, name, static_cast<int>(sizeof(name) - 1), index);
    info.name = name;
    info.arch = arch_of(index);
    info.warp_size = attribute(attributes_.warp_size, index);
    info.max_threads_per_block = std::min(1024, attribute(attributes_.max_threads_per_block, index));
    info.multiprocessors = attribute(attributes_.multiprocessors, index);
    info.shared_memory_bytes = static_cast<size_t>(attribute(attributes_.shared_memory_bytes, index));
  }
  int version = 0;
  if (functions_.get_version.call != nullptr) {
    if (functions_.get_version.call(&version) == 0) {
      driver_.version = version_text(version);
    } else {
      clear_error();
    }
  }
  devices_ = std::move(devices);
  forks_before_ = forks;
  is_loaded_.store(true, std::memory_order_release);
}

GpuRuntime::DeviceState& GpuRuntime::state(int index) {
  load_driver();
  if (index < 0 || static_cast<size_t>(index) >= devices_.size()) {
    throw std::runtime_error(
        text("no ", label_, " device ", index, ": the driver reports ", devices_.size()));
  }
  return *devices_[index];
}

GpuRuntime::DeviceState& GpuRuntime::ready(int index) {
  DeviceState& device = state(index);
  if (device.is_ready.load(std::memory_order_acquire)) return device;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (device.is_ready.load(std::memory_order_relaxed)) return device;
  prepare(index);
  const CurrentDevice current(*this, index);
  const RelaxedCapture relaxed(*this);
  load_module(device, index);
  reserve_counters(device);
  device.is_ready.store(true, std::memory_order_release);
  return device;
}

void GpuRuntime::load_module(DeviceState& state, int index) {
  if (state.module == nullptr) {
    void* module = nullptr;
    if (const int code = functions_.load_module.call(&module, image_.begin)) {
      throw std::runtime_error(text("hisparse was built for ", image_.archs, "; device ", index, " is ",
                                    state.info.arch, ": ", error_text(functions_.load_module.name, code)));
    }
    state.module = module;
  }
  for (int id = 0; id < static_cast<int>(KernelId::kCount); ++id) {
    check(functions_.get_kernel, &state.kernels[id], state.module, kKernelNames[id]);
    allow_shared_memory(state.kernels[id], state.info);
  }
}

// On a stream of its own: the default stream would wait for streams that are being captured, and so break the
// capture.
void GpuRuntime::reserve_counters(DeviceState& state) {
  void* stream = nullptr;
  void* memory = nullptr;
  constexpr size_t kBytes = ArrivalCounters::kReserve * sizeof(uint32_t);
  check(functions_.create_stream, &stream, kNonBlocking);
  if (functions_.allocate.call(&memory, kBytes) == 0) {
    check(functions_.fill, memory, static_cast<unsigned char>(0), kBytes, stream);
    check(functions_.synchronize_stream, stream);
    state.counters.set_memory(static_cast<uint32_t*>(memory), ArrivalCounters::kReserve);
  } else {
    clear_error();  // a full device still works, with one block per request
  }
  check(functions_.destroy_stream, stream);
}

std::optional<DriverInfo> GpuRuntime::driver() {
  load_driver();
  return driver_;
}

int GpuRuntime::device_count() {
  load_driver();
  return static_cast<int>(devices_.size());
}

const DeviceInfo& GpuRuntime::device(int index) { return state(index).info; }

void GpuRuntime::launch(KernelId kernel, const void* params, size_t, const LaunchShape& shape, int device,
                        void* stream) {
  DeviceState& state = ready(device);
  const CurrentDevice current(*this, device);
  void* parameters[] = {const_cast<void*>(params)};
  check(functions_.launch_kernel, state.kernels[static_cast<int>(kernel)], shape.blocks, shape.parts, 1u,
        shape.threads, 1u, 1u, static_cast<unsigned>(shape.shared_bytes), stream,
        static_cast<void**>(parameters), static_cast<void**>(nullptr));
}

// Host memory can consist of several registered pieces: every piece has to continue the one before.
std::optional<uintptr_t> GpuRuntime::device_address(const void* host, size_t bytes, int device) {
  ready(device);
  const CurrentDevice current(*this, device);
  std::optional<uintptr_t> address;
  for (size_t done = 0; done < bytes;) {
    const MappedMemory piece = mapped_memory(reinterpret_cast<uintptr_t>(host) + done);
    if (piece.address == 0 || (address && piece.address != *address + done)) return std::nullopt;
    if (!address) address = piece.address;
    done = piece.bytes > 0 ? done + std::min(piece.bytes, bytes - done) : std::max(done + 1, bytes - 1);
  }
  return address;
}

void GpuRuntime::register_memory(void* host, size_t bytes, int device) {
  ready(device);
  const CurrentDevice current(*this, device);
  const RelaxedCapture relaxed(*this);
  const int code = functions_.register_host.call(host, bytes, kPortableAndMapped);
  if (code == 0) return;
  const std::string what = error_text(functions_.register_host.name, code);
  if (code == kAlreadyRegistered) throw std::invalid_argument(what);
  throw std::runtime_error(what);
}

void GpuRuntime::unregister_memory(void* host, int device) {
  ready(device);
  const CurrentDevice current(*this, device);
  const RelaxedCapture relaxed(*this);
  check(functions_.unregister_host, host);
}

bool GpuRuntime::captures(int device, void* stream) {
  ready(device);
  const CurrentDevice current(*this, device);
  return is_captured(stream);
}

bool GpuRuntime::is_captured(void* stream) {
  int capturing = 0;
  check(functions_.is_capturing, stream, &capturing);
  return capturing != 0;
}

void GpuRuntime::copy(CopyList& copies, int device, void* stream) {
  ready(device);
  const CurrentDevice current(*this, device);
  // Graphs have no node for batches, and the legacy default stream takes none.
  const auto handle = reinterpret_cast<uintptr_t>(stream);
  bool batched = handle != kNullStream && handle != kLegacyStream && !is_captured(stream);
  for (size_t first = 0; first < copies.size();) {
    const size_t count = std::min(copies.size() - first, kMaxBatch);
    if (batched && count > 1) {
      batched = copy_batch(&copies.dst[first], &copies.src[first], &copies.bytes[first], count, stream) == 0;
      if (batched) {
        first += count;
        continue;
      }
      clear_error();  // whatever it was: single copies may do, and else say what is wrong
    }
    for (const size_t end = first + count; first < end; ++first)
      copy_one(copies.dst[first], copies.src[first], copies.bytes[first], stream);
  }
}

void GpuRuntime::read(void* to, const void* from, size_t bytes, int device, void* stream) {
  ready(device);
  const CurrentDevice current(*this, device);
  copy_one(to, from, bytes, stream);
  check(functions_.synchronize_stream, stream);
}

void GpuRuntime::inspect(KernelId kernel, const void* params, size_t param_bytes, uint64_t*& report,
                         uint64_t* result, size_t words, const LaunchShape& shape, int device, void* stream) {
  DeviceState& state = ready(device);
  const std::lock_guard<std::mutex> lock(state.report_mutex);
  const size_t bytes = words * sizeof(uint64_t);
  {
    const CurrentDevice current(*this, device);
    if (state.report == nullptr) {
      void* memory = nullptr;
      check(functions_.allocate, &memory, kReportBytes);
      state.report = memory;
    }
    check(functions_.fill, state.report, static_cast<unsigned char>(0xFF), bytes, stream);
  }
  report = static_cast<uint64_t*>(state.report);
  launch(kernel, params, param_bytes, shape, device, stream);
  read(result, state.report, bytes, device, stream);
}

uint32_t* GpuRuntime::arrival_counters(int batch, int device, void* stream) {
  DeviceState& state = ready(device);
  const CurrentDevice current(*this, device);
  if (is_captured(stream)) return state.counters.for_graph(batch);

  ArrivalCounters::StreamKey key{reinterpret_cast<uintptr_t>(stream), 0};
  if (functions_.get_stream_id.call != nullptr) {
    unsigned long long id = 0;
    check(functions_.get_stream_id, stream, &id);
    key = {id, 0};
  } else {
    // A handle can stand for one stream per thread.
    key.second = std::hash<std::thread::id>{}(std::this_thread::get_id());
  }
  return state.counters.for_stream(key, batch);
}

}  // namespace hisparse::host
