// What the launcher needs of a target. One implementation per target: cpu_runtime.cpp, cuda_runtime.cpp,
// hip_runtime.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../common/params.h"

namespace hisparse::host {

struct DeviceInfo {
  std::string name;
  std::string arch;  // "sm_90", "gfx942", "cpu"
  int warp_size = 0;
  int max_threads_per_block = 0;
  int multiprocessors = 0;
  size_t shared_memory_bytes = 0;  // the most that one block can have, opt-in included
};

// What stands between the extension and the devices of a target.
struct DriverInfo {
  std::string library;  // the file that was loaded
  std::string
      version;  // "12.8": of CUDA that the driver supports, of the HIP runtime; "" where it is unknown
};

// This machine cannot run the target at all: no device code in this build, no driver, or no device.
class NoDevice : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Copies without overlap, in any order among them.
struct CopyList {
  std::vector<void*> dst, src;
  std::vector<size_t> bytes;

  size_t size() const { return bytes.size(); }
  void add(void* to, const void* from, size_t count) {
    dst.push_back(to);
    src.push_back(const_cast<void*>(from));
    bytes.push_back(count);
  }
  void clear() {
    dst.clear();
    src.clear();
    bytes.clear();
  }
};

struct LaunchShape {
  uint32_t blocks = 1;
  uint32_t parts = 1;  // the grid is blocks x parts
  uint32_t threads = 1;
  size_t shared_bytes = 0;
};

class Runtime {
 public:
  virtual ~Runtime() = default;
  virtual const char* target() const = 0;                              // "cpu", "cuda", "rocm"
  virtual std::optional<DriverInfo> driver() { return std::nullopt; }  // nothing where the target needs none
  virtual int device_count() = 0;
  virtual const DeviceInfo& device(int index) = 0;

  // Enqueues one kernel; `params` is copied before the call returns. The caller's current device is as before
  // afterwards.
  virtual void launch(KernelId kernel, const void* params, size_t param_bytes, const LaunchShape& shape,
                      int device, void* stream) = 0;

  // The address at which kernels on `device` reach [host, host + bytes), or nothing where they cannot.
  virtual std::optional<uintptr_t> device_address(const void* host, size_t bytes, int device) = 0;

  // Makes host memory reachable for the kernels of every device. std::invalid_argument where it is registered
  // already.
  virtual void register_memory(void* host, size_t bytes, int device) = 0;
  virtual void unregister_memory(void* host, int device) = 0;

  virtual bool captures(int device, void* stream) = 0;  // whether the stream is captured in a graph

  // Enqueues copies, each from and to memory that the device reaches, by its host address where it is on the
  // host.
  virtual void copy(CopyList& copies, int device, void* stream) = 0;

  // Reads device memory, as it is once the stream has done what is enqueued so far. Not while the stream is
  // captured.
  virtual void read(void* to, const void* from, size_t bytes, int device, void* stream) = 0;

  // Launches a kernel that looks at memory, and waits for it: `report`, a member of `params`, gets room for
  // `words` words of ones, and `result` what the kernel makes of them. Not while the stream is captured.
  virtual void inspect(KernelId kernel, const void* params, size_t param_bytes, uint64_t*& report,
                       uint64_t* result, size_t words, const LaunchShape& shape, int device,
                       void* stream) = 0;

  // `batch` zeroed counters that no launch running at the same time uses, or null where there are none to be
  // had (then one block has to serve a request).
  virtual uint32_t* arrival_counters(int batch, int device, void* stream) = 0;
};

}  // namespace hisparse::host
