#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "runtime.h"

namespace hisparse::host {

struct CpuOptions {
  int warp_size = 64;              // 32 or 64
  std::optional<uint64_t> seed;    // unset: threads run in order
  bool strict = false;             // threads that leave before a barrier are an error
  std::string item_copy = "wave";  // "wave": the AMD item copy, "chunk": the NVIDIA one
  size_t shared_memory_bytes = 256 * 1024;
};

// Process-wide. Where no options are set, the environment decides, read at each call.
CpuOptions cpu_options();
void set_cpu_options(const std::optional<CpuOptions>& options);

Runtime& cpu_runtime();

}  // namespace hisparse::host
