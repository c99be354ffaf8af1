// What the launchers of all ops do with their calls.
#pragma once

#include "device.h"
#include "errors.h"
#include "launcher.h"
#include "runtime.h"

namespace hisparse::host {

inline void check_block_size(int64_t block_size, const DeviceInfo& info, Device device) {
  if (block_size % info.warp_size != 0) {
    value_error("block_size",
                text("a multiple of the warp size, ", info.warp_size, " on ", to_string(device)),
                std::to_string(block_size));
  }
  if (block_size > info.max_threads_per_block) {
    value_error("block_size",
                text("at most ", info.max_threads_per_block, ", the limit of ", to_string(device)),
                std::to_string(block_size));
  }
}

// CUDA takes more, but HIP counts the threads of a grid in 32 bits.
inline constexpr int64_t kMaxBlocks = (int64_t{1} << 32) / 1024 - 1;

// Replaces the address of a pool by that at which the device reaches it. std::invalid_argument where it does
// not.
template <typename Byte>
void resolve(Byte*& base, const PoolMemory& memory, Runtime& runtime, Device device) {
  if (!memory.on_host || device.kind == DeviceKind::kCpu || memory.bytes == 0) return;
  const auto address = runtime.device_address(base, static_cast<size_t>(memory.bytes), device.index);
  if (!address) {
    value_error(memory.argument,
                text("host memory that ", to_string(device), " can reach (pinned or registered)"),
                text("memory of which at least a part is not device accessible (", memory.bytes, " bytes at ",
                     static_cast<const void*>(base), ")"));
  }
  base = reinterpret_cast<Byte*>(*address);
}

}  // namespace hisparse::host
