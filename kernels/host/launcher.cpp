#include "launcher.h"

#include <algorithm>
#include <atomic>

#include "cpu_runtime.h"
#include "device_runtimes.h"
#include "errors.h"
#include "launch_policy.h"
#include "resolve.h"

namespace hisparse::host {
namespace {

std::atomic<CopyPart> left_out{CopyPart::kNone};

CopyShape copy_shape(const void* source, const void* destination, int64_t item_size_bytes, int32_t workers) {
  const int32_t widest_word = left_out == CopyPart::kWideWords ? 8 : 16;
  const uint64_t together = reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(destination) |
                            static_cast<uint64_t>(item_size_bytes);
  int32_t word_bytes = 1;
  for (int32_t candidate : {4, 8, 16}) {
    if (candidate <= widest_word && together % candidate == 0) word_bytes = candidate;
  }
  return CopyShape::make(static_cast<int32_t>(item_size_bytes), word_bytes, workers, widest_word);
}

// Whether `count` neighbours, from a multiple of it on, are one aligned access in every row.
template <typename T>
bool are_rows_aligned(const T* base, int64_t stride, int count) {
  return reinterpret_cast<uintptr_t>(base) % (count * sizeof(T)) == 0 && stride % count == 0;
}

void check_block_size(int64_t block_size, const DeviceInfo& info, Device device) {
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

}  // namespace

Runtime& runtime_of(DeviceKind kind) {
  switch (kind) {
    case DeviceKind::kCuda:
      return cuda_runtime();
    case DeviceKind::kRocm:
      return hip_runtime();
    default:
      return cpu_runtime();
  }
}

void leave_out(CopyPart part) { left_out = part; }

void launch(SwapInCall& call) {
  SwapInParams& params = call.params;
  Runtime& runtime = runtime_of(call.device.kind);
  const DeviceInfo& info = runtime.device(call.device.index);
  const bool on_cpu = call.device.kind == DeviceKind::kCpu;

  check_block_size(call.block_size, info, call.device);
  if (params.num_top_k > SwapInLayout::kMaxTopK) {
    value_error("num_top_k", text("at most ", SwapInLayout::kMaxTopK), std::to_string(params.num_top_k));
  }
  const int wanted_threads = static_cast<int>(call.block_size);
  const SwapInShape row = swap_in_shape(
      info, on_cpu ? wanted_threads : swap_in_threads(info, wanted_threads, params.hot_buffer_size),
      params.num_top_k, params.hot_buffer_size, params.max_tokens);
  if (row.layout.bytes > info.shared_memory_bytes) {
    value_error(
        "num_top_k, hot_buffer_size",
        text("a plan that fits in a block's ", info.shared_memory_bytes, " bytes of shared memory on ",
             to_string(call.device)),
        text(params.num_top_k, " and ", params.hot_buffer_size, ", which need ", row.layout.bytes, " bytes"));
  }
  resolve(params.host_cache.base, call.host_cache, runtime, call.device);
  if (params.batch > kMaxBlocks) {
    value_error("top_k_tokens", text("at most ", kMaxBlocks, " rows"), std::to_string(params.batch));
  }
  if (params.batch == 0) return;

  int blocks = call.blocks_per_request;
  if (blocks == 0) {
    blocks = on_cpu ? 1
                    : swap_in_blocks_per_request(info, params.batch, params.num_top_k * call.item_size_bytes,
                                                 row.threads);
  }
  blocks = static_cast<int>(std::min<int64_t>(blocks, kMaxBlocks / params.batch));
  if (blocks > 1) {
    params.arrivals = runtime.arrival_counters(params.batch, call.device.index, call.stream);
    if (params.arrivals == nullptr) blocks = 1;
  }
  params.layout = row.layout;
  params.blocks_per_request = blocks;
  params.slots_per_thread = row.slots_per_thread;
  params.entries_per_thread = row.entries_per_thread;
  params.rows_are_aligned = params.hot_buffer_size % 4 == 0 &&
                            are_rows_aligned(params.device_buffer_tokens, params.buffer_table_stride, 4) &&
                            are_rows_aligned(params.device_buffer_locs, params.buffer_table_stride, 4) &&
                            are_rows_aligned(params.lru_slots, params.lru_stride, 4);
  constexpr int kRun = kEntriesInRegisters;
  params.runs_are_aligned = params.num_top_k % kRun == 0 &&
                            are_rows_aligned(params.top_k_tokens, params.top_k_stride, kRun) &&
                            are_rows_aligned(params.top_k_device_locs, params.device_locs_stride, kRun);
  params.copy = copy_shape(params.host_cache.base, params.device_buffer.base, call.item_size_bytes,
                           blocks * row.threads);

  LaunchShape shape;
  shape.blocks = static_cast<uint32_t>(params.batch);
  shape.parts = static_cast<uint32_t>(blocks);
  shape.threads = static_cast<uint32_t>(row.threads);
  shape.shared_bytes = row.layout.bytes;
  runtime.launch(row.kernel, &params, sizeof(params), shape, call.device.index, call.stream);
}

void launch(CopyItemsCall& call) {
  CopyItemsParams& params = call.params;
  Runtime& runtime = runtime_of(call.device.kind);
  const DeviceInfo& info = runtime.device(call.device.index);
  resolve(params.src.base, call.src, runtime, call.device);
  resolve(params.dst.base, call.dst, runtime, call.device);
  if (params.count == 0) return;

  LaunchShape shape;
  shape.blocks = static_cast<uint32_t>(call.blocks > 0 ? call.blocks : copy_blocks(info, params.count));
  shape.threads = kCopyThreads;
  params.copy =
      copy_shape(params.src.base, params.dst.base, call.item_size_bytes, shape.blocks * kCopyThreads);
  const KernelId kernel = left_out == CopyPart::kLoadHint ? KernelId::kCopyItemsPlainLoads
                          : left_out == CopyPart::kGate   ? KernelId::kCopyItemsUngated
                                                          : KernelId::kCopyItems;
  runtime.launch(kernel, &params, sizeof(params), shape, call.device.index, call.stream);
}

}  // namespace hisparse::host
