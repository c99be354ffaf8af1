// Checked calls on their way to a kernel: the target is chosen, memory resolved, and the launch shaped.
// Nothing here touches Python objects, so the callers release the GIL.
#pragma once

#include <cstdint>
#include <optional>

#include "../common/params.h"
#include "device.h"
#include "runtime.h"

namespace hisparse::host {

// What is left to resolve in the pools of a call: host memory may have another address on the device.
struct PoolMemory {
  const char* argument = nullptr;
  int64_t bytes = 0;
  bool on_host = false;
};

struct SwapInCall {
  SwapInKind kind = SwapInKind::kTokens;
  SwapInParams params{};
  PoolMemory host_cache, host_values;
  Device device;
  void* stream = nullptr;
  int64_t item_size_bytes = 0;
  int64_t block_size = 0;
  int blocks_per_request = 0;  // 0: by policy
};

struct PlannedCopyCall {
  PlannedCopyParams params{};
  PoolMemory host_cache;
  Device device;
  void* stream = nullptr;
  int64_t item_size_bytes = 0;
  int64_t num_blocks = 0;
  int64_t block_size = 0;
  bool is_dsv4 = false;
};

struct LayerTokensCall {
  LayerCopyParams params{};
  Device device;
  void* stream = nullptr;
  int64_t block_size = 0;
};

struct TranslateCall {
  TranslateParams params{};
  Device device;
  void* stream = nullptr;
};

struct CopyItemsCall {
  CopyItemsParams params{};
  PoolMemory src, dst;
  Device device;
  void* stream = nullptr;
  int64_t item_size_bytes = 0;
  int64_t blocks = 0;  // 0: by policy
};

// Parts of the item copy that the benchmark leaves out, to see what they bring: words of more than 8 bytes,
// and of copy_items alone the hint that data is read once, and the gate of the AMD copy.
enum class CopyPart : int32_t { kNone, kWideWords, kLoadHint, kGate };

// From now on, process-wide.
void leave_out(CopyPart part);

// Raises std::invalid_argument where the device can't do what was asked, before anything is launched. An
// empty batch or index list passes the same checks and launches nothing.
void launch(SwapInCall& call);
void launch(PlannedCopyCall& call);
void launch(LayerTokensCall& call);
void launch(TranslateCall& call);
void launch(CopyItemsCall& call);

Runtime& runtime_of(DeviceKind kind);

// The GPUs of this machine; of two vendors' `prefers_rocm` says which are meant. None: there is no driver or
// device.
std::optional<DeviceKind> gpu_kind(bool prefers_rocm);

}  // namespace hisparse::host
