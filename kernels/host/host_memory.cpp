#include "host_memory.h"

#include "errors.h"
#include "launcher.h"
#include "released_gil.h"
#include "tensor.h"

namespace py = pybind11;

namespace hisparse::host {
namespace {

Runtime& runtime_with(const std::string& target, int64_t device_index) {
  Runtime& runtime = runtime_of(target == "rocm" ? DeviceKind::kRocm : DeviceKind::kCuda);
  const int count = runtime.device_count();
  if (device_index >= count)
    value_error("device_index", text("0 to ", count - 1), std::to_string(device_index));
  return runtime;
}

}  // namespace

std::pair<uintptr_t, int64_t> host_memory(py::handle object) {
  const TensorView memory("memory", object);
  if (memory.on_gpu())
    value_error("memory", "a tensor on the CPU", text("one on ", to_string(memory.device())));
  if (!memory.is_row_major())
    value_error("memory", "row-major storage", text("strides ", memory.strides_text()));
  return {reinterpret_cast<uintptr_t>(memory.data<void>()), memory.bytes()};
}

std::optional<std::string> gpu_target() {
  const bool prefers_rocm = torch_is_for_rocm();
  const ReleasedGil released;
  const std::optional<DeviceKind> kind = gpu_kind(prefers_rocm);
  if (!kind) return std::nullopt;
  return runtime_of(*kind).target();
}

void register_host_memory(const std::string& target, uintptr_t address, size_t bytes, int64_t device_index) {
  const ReleasedGil released;
  runtime_with(target, device_index)
      .register_memory(reinterpret_cast<void*>(address), bytes, static_cast<int>(device_index));
}

void unregister_host_memory(const std::string& target, uintptr_t address, int64_t device_index) {
  const ReleasedGil released;
  runtime_with(target, device_index)
      .unregister_memory(reinterpret_cast<void*>(address), static_cast<int>(device_index));
}

}  // namespace hisparse::host
