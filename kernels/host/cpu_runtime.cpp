#include "cpu_runtime.h"

#include <pthread.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "../cpu/executor.h"

namespace hisparse::cpu_wave32 {
cpu::Kernel kernel(KernelId id, bool chunk_copy);
}
namespace hisparse::cpu_wave64 {
cpu::Kernel kernel(KernelId id, bool chunk_copy);
}

namespace hisparse::host {
namespace {

void check(const CpuOptions& options, bool in_environment = false) {
  const auto refuse = [&](std::string option, const std::string& expected, const std::string& got) {
    if (in_environment) {
      for (char& letter : option) letter = static_cast<char>(std::toupper(letter));
      option = "HISPARSE_CPU_" + option;
    }
    throw std::invalid_argument(option + ": expected " + expected + ", got " + got);
  };
  if (options.warp_size != 32 && options.warp_size != 64)
    refuse("warp_size", "32 or 64", std::to_string(options.warp_size));
  if (options.item_copy != "wave" && options.item_copy != "chunk")
    refuse("item_copy", "'wave' or 'chunk'", "'" + options.item_copy + "'");
  if (options.shared_memory_bytes > size_t{1} << 30)
    refuse("shared_memory_bytes", "at most 1 GiB", std::to_string(options.shared_memory_bytes));
}

const char* from_environment(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? text : nullptr;
}

uint64_t number_from_environment(const char* name, const char* text, uint64_t most) {
  errno = 0;
  char* end = nullptr;
  const uint64_t value = std::isdigit(static_cast<unsigned char>(*text)) ? std::strtoull(text, &end, 10) : 0;
  if (end == nullptr || *end != '\0' || errno != 0 || value > most)
    throw std::invalid_argument(std::string(name) + ": expected a number from 0 to " + std::to_string(most) +
                                ", got '" + text + "'");
  return value;
}

CpuOptions options_from_environment() {
  CpuOptions options;
  if (const char* text = from_environment("HISPARSE_CPU_WARP_SIZE"))
    options.warp_size = static_cast<int>(number_from_environment("HISPARSE_CPU_WARP_SIZE", text, INT_MAX));
  if (const char* text = from_environment("HISPARSE_CPU_SEED"))
    options.seed = number_from_environment("HISPARSE_CPU_SEED", text, INT64_MAX);
  if (const char* text = from_environment("HISPARSE_CPU_STRICT"))
    options.strict = number_from_environment("HISPARSE_CPU_STRICT", text, 1) != 0;
  if (const char* text = from_environment("HISPARSE_CPU_ITEM_COPY")) options.item_copy = text;
  if (const char* text = from_environment("HISPARSE_CPU_SHARED_MEMORY_BYTES"))
    options.shared_memory_bytes =
        number_from_environment("HISPARSE_CPU_SHARED_MEMORY_BYTES", text, INT64_MAX);
  check(options, true);
  return options;
}

std::mutex options_mutex;
std::optional<CpuOptions> chosen_options;

// A process that is forked while another thread holds the lock would find it held for ever.
const int kForksWithoutLock = pthread_atfork([] { options_mutex.lock(); }, [] { options_mutex.unlock(); },
                                             [] { options_mutex.unlock(); });

class CpuRuntime final : public Runtime {
 public:
  const char* target() const override { return "cpu"; }
  int device_count() override { return 1; }

  const DeviceInfo& device(int) override {
    thread_local DeviceInfo info;
    const CpuOptions& options = snapshot() = cpu_options();
    info = {"SIMT executor", "cpu", options.warp_size, 1024, 1, options.shared_memory_bytes};
    return info;
  }

  void launch(KernelId id, const void* params, size_t, const LaunchShape& shape, int, void*) override {
    const CpuOptions& options = snapshot();
    const bool chunk_copy = options.item_copy == "chunk";
    const cpu::Kernel kernel =
        options.warp_size == 32 ? cpu_wave32::kernel(id, chunk_copy) : cpu_wave64::kernel(id, chunk_copy);
    try {
      cpu::run_grid(kernel, params,
                    {shape.blocks, shape.parts, shape.threads, options.warp_size, shape.shared_bytes},
                    {options.seed, options.strict});
    } catch (...) {
      counters().clear();  // where a kernel was given up, they are what they were
      throw;
    }
  }

  std::optional<uintptr_t> device_address(const void* host, size_t, int) override {
    return reinterpret_cast<uintptr_t>(host);
  }

  void register_memory(void*, size_t, int) override {}
  void unregister_memory(void*, int) override {}

  bool captures(int, void*) override { return false; }

  void copy(CopyList& copies, int, void*) override {
    for (size_t i = 0; i < copies.size(); ++i) std::memmove(copies.dst[i], copies.src[i], copies.bytes[i]);
  }

  void read(void* to, const void* from, size_t bytes, int, void*) override { std::memcpy(to, from, bytes); }

  void inspect(KernelId id, const void* params, size_t param_bytes, uint64_t*& report, uint64_t* result,
               size_t words, const LaunchShape& shape, int device, void* stream) override {
    std::fill_n(result, words, ~uint64_t{0});
    report = result;
    launch(id, params, param_bytes, shape, device, stream);
  }

  // A launch is over when it returns, so one set per thread is enough. As on a GPU, each leaves them zero.
  uint32_t* arrival_counters(int batch, int, void*) override {
    if (counters().size() < static_cast<size_t>(batch)) counters().assign(static_cast<size_t>(batch), 0);
    return counters().data();
  }

 private:
  // The options by which a launch was shaped are those that it runs with, whatever another thread sets
  // meanwhile: the launcher asks for the device first.
  static CpuOptions& snapshot() {
    thread_local CpuOptions options;
    return options;
  }

  static std::vector<uint32_t>& counters() {
    thread_local std::vector<uint32_t> all;
    return all;
  }
};

}  // namespace

CpuOptions cpu_options() {
  const std::lock_guard<std::mutex> lock(options_mutex);
  return chosen_options ? *chosen_options : options_from_environment();
}

void set_cpu_options(const std::optional<CpuOptions>& options) {
  if (options) check(*options);
  const std::lock_guard<std::mutex> lock(options_mutex);
  chosen_options = options;
}

Runtime& cpu_runtime() {
  static CpuRuntime runtime;
  return runtime;
}

}  // namespace hisparse::host
