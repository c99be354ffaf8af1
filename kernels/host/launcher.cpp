#include "launcher.h"

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <utility>

#include "content_check.h"
#include "cpu_runtime.h"
#include "device_runtimes.h"
#include "errors.h"
#include "launch_policy.h"
#include "resolve.h"

namespace hisparse::host {
namespace {

std::atomic<CopyPart> left_out{CopyPart::kNone};

CopyShape copy_shape(std::initializer_list<const void*> pools, int64_t item_size_bytes, int32_t workers) {
  const int32_t widest_word = left_out == CopyPart::kWideWords ? 8 : 16;
  uint64_t together = static_cast<uint64_t>(item_size_bytes);
  for (const void* pool : pools) together |= reinterpret_cast<uintptr_t>(pool);
  int32_t word_bytes = 1;
  for (int32_t candidate : {4, 8, 16}) {
    if (candidate <= widest_word && together % candidate == 0) word_bytes = candidate;
  }
  return CopyShape::make(static_cast<int32_t>(item_size_bytes), word_bytes, workers, widest_word);
}

CopyShape swap_in_copy_shape(const SwapInCall& call, int32_t workers) {
  const SwapInParams& params = call.params;
  const void *host = params.host_cache.base, *device = params.device_buffer.base;
  if (call.kind == SwapInKind::kBlocks)
    return copy_shape({host, device, params.host_values, params.device_values}, call.item_size_bytes,
                      workers);
  if (call.kind == SwapInKind::kTokens) return copy_shape({host, device}, call.item_size_bytes, workers);
  // The values decide: a scale is one word of 8 bytes at any width.
  const int32_t word_bytes = copy_shape({host, device}, Dsv4Layout::kValueBytes, workers).word_bytes;
  return CopyShape::make(Dsv4Layout::kItemBytes, word_bytes, workers, 16, Dsv4Layout::kScaleBytes);
}

// Whether `count` neighbours, from a multiple of it on, are one aligned access in every row.
template <typename T>
bool are_rows_aligned(const T* base, int64_t stride, int count) {
  return reinterpret_cast<uintptr_t>(base) % (count * sizeof(T)) == 0 && stride % count == 0;
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

std::optional<DeviceKind> gpu_kind(bool prefers_rocm) {
  DeviceKind kinds[] = {DeviceKind::kCuda, DeviceKind::kRocm};
  if (prefers_rocm) std::swap(kinds[0], kinds[1]);
  for (const DeviceKind kind : kinds) {
    try {
      runtime_of(kind).device_count();
      return kind;
    } catch (const NoDevice&) {
    }
  }
  return std::nullopt;
}

void leave_out(CopyPart part) { left_out = part; }

void launch(SwapInCall& call) {
  SwapInParams& params = call.params;
  Runtime& runtime = runtime_of(call.device.kind);
  const DeviceInfo& info = runtime.device(call.device.index);
  const bool on_cpu = call.device.kind == DeviceKind::kCpu;
  const bool by_blocks = call.kind == SwapInKind::kBlocks;

  check_block_size(call.block_size, info, call.device);
  if (params.num_top_k > SwapInLayout::kMaxTopK) {
    value_error(by_blocks ? "sparse_block_size" : "num_top_k",
                text(by_blocks ? "entries of a row, with top_k_blocks, of at most " : "at most ",
                     SwapInLayout::kMaxTopK),
                std::to_string(params.num_top_k));
  }
  const int wanted_threads = static_cast<int>(call.block_size);
  const SwapInShape row = swap_in_shape(
      info, on_cpu ? wanted_threads : swap_in_threads(info, wanted_threads, params.hot_buffer_size),
      params.num_top_k, params.hot_buffer_size, params.max_tokens);
  if (row.layout.bytes > info.shared_memory_bytes) {
    value_error(
        by_blocks ? "sparse_block_size, hot_buffer_size" : "num_top_k, hot_buffer_size",
        text("a plan that fits in a block's ", info.shared_memory_bytes, " bytes of shared memory on ",
             to_string(call.device)),
        text(params.num_top_k, " and ", params.hot_buffer_size, ", which need ", row.layout.bytes, " bytes"));
  }
  resolve(params.host_cache.base, call.host_cache, runtime, call.device);
  resolve(params.host_values, call.host_values, runtime, call.device);
  if (params.batch > kMaxBlocks) {
    value_error(by_blocks ? "top_k_blocks" : "top_k_tokens", text("at most ", kMaxBlocks, " rows"),
                std::to_string(params.batch));
  }
  if (params.batch == 0) return;

  if (checks_contents())
    check_contents(params, static_cast<uint32_t>(row.threads), {runtime, info, call.device, call.stream});
  int blocks = call.blocks_per_request;
  if (blocks == 0) {
    blocks = on_cpu ? 1
                    : swap_in_blocks_per_request(
                          info, params.batch, params.num_top_k * call.item_size_bytes * (by_blocks ? 2 : 1),
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
  params.copy = swap_in_copy_shape(call, blocks * row.threads);

  LaunchShape shape;
  shape.blocks = static_cast<uint32_t>(params.batch);
  shape.parts = static_cast<uint32_t>(blocks);
  shape.threads = static_cast<uint32_t>(row.threads);
  shape.shared_bytes = row.layout.bytes;
  runtime.launch(swap_in_kernel(call.kind, row.kernel), &params, sizeof(params), shape, call.device.index,
                 call.stream);
}

void launch(CopyItemsCall& call) {
  CopyItemsParams& params = call.params;
  Runtime& runtime = runtime_of(call.device.kind);
  const DeviceInfo& info = runtime.device(call.device.index);
  resolve(params.src.base, call.src, runtime, call.device);
  resolve(params.dst.base, call.dst, runtime, call.device);
  if (params.count == 0) return;
  if (checks_contents()) {
    check_indices(params.src_indices, params.dst_indices, params.count, params.src.rows, params.dst.rows,
                  {runtime, info, call.device, call.stream});
  }

  LaunchShape shape;
  shape.blocks = static_cast<uint32_t>(call.blocks > 0 ? call.blocks : copy_blocks(info, params.count));
  shape.threads = kCopyThreads;
  params.copy =
      copy_shape({params.src.base, params.dst.base}, call.item_size_bytes, shape.blocks * kCopyThreads);
  const KernelId kernel = left_out == CopyPart::kLoadHint ? KernelId::kCopyItemsPlainLoads
                          : left_out == CopyPart::kGate   ? KernelId::kCopyItemsUngated
                                                          : KernelId::kCopyItems;
  runtime.launch(kernel, &params, sizeof(params), shape, call.device.index, call.stream);
}

}  // namespace hisparse::host
