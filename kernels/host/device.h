// A device as the caller names it: the kind and the index in its framework.
#pragma once

#include <cstdint>
#include <string>

namespace hisparse::host {

enum class DeviceKind : uint8_t { kCpu, kCuda, kRocm };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  friend bool operator==(Device a, Device b) { return a.kind == b.kind && a.index == b.index; }
  friend bool operator!=(Device a, Device b) { return !(a == b); }
};

inline std::string to_string(Device device) {
  if (device.kind == DeviceKind::kCpu) return "cpu";
  return (device.kind == DeviceKind::kCuda ? "cuda:" : "rocm:") + std::to_string(device.index);
}

}  // namespace hisparse::host
