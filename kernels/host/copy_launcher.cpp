// The launches of the ops beside the swap-in: planned copies, tokens of all layers, translation.
#include <algorithm>

#include "launch_policy.h"
#include "launcher.h"
#include "resolve.h"

namespace hisparse::host {
namespace {

uint32_t items_per_tile(int64_t item_bytes, const DeviceInfo& info) {
  return static_cast<uint32_t>(std::clamp<int64_t>(kTileBytes / item_bytes, 1, info.warp_size));
}

// Warps of a planned copy that are at work in one block. A block of more takes longer to begin than they
// save: with 32 of them, 200 items take 1 to 6 % longer on an H200, 410 up to 2 %.
constexpr int64_t kPlannedWarps = 16;

// A block of this size, or of the most warps, which has to fit in what one block can have.
LaunchShape block_of(int64_t block_size, int64_t most_warps, int64_t (*shared_bytes_of)(int64_t threads),
                     const DeviceInfo& info, Device device) {
  check_block_size(block_size, info, device);
  const int64_t threads = std::min(block_size, most_warps * info.warp_size);
  // Not before: a block size that was not checked yet may be any number.
  const auto shared_bytes = static_cast<size_t>(shared_bytes_of(threads));
  if (shared_bytes > info.shared_memory_bytes) {
    value_error("block_size",
                text("threads that fit in a block's ", info.shared_memory_bytes,
                     " bytes of shared memory on ", to_string(device)),
                text(block_size, ", of which ", threads, " need ", shared_bytes, " bytes"));
  }
  LaunchShape shape;
  shape.threads = static_cast<uint32_t>(threads);
  shape.shared_bytes = shared_bytes;
  return shape;
}

}  // namespace

void launch(PlannedCopyCall& call) {
  PlannedCopyParams& params = call.params;
  Runtime& runtime = runtime_of(call.device.kind);
  const DeviceInfo& info = runtime.device(call.device.index);
  LaunchShape shape =
      block_of(call.block_size, kPlannedWarps, &PlannedCopyParams::shared_bytes, info, call.device);
  resolve(params.host_cache.base, call.host_cache, runtime, call.device);
  if (params.batch == 0) return;

  shape.blocks = static_cast<uint32_t>(call.num_blocks);
  params.shape = TileShape::make(static_cast<int32_t>(call.item_size_bytes), info.warp_size,
                                 call.is_dsv4 ? Dsv4Layout::kScaleBytes : 0);
  params.items_per_tile = items_per_tile(call.item_size_bytes, info);
  const int64_t threads = shape.threads;
  const int64_t warps = call.num_blocks * (threads / info.warp_size);
  const int64_t entries = divide_up(params.plan_width, warps);
  while (int64_t{1} << params.log2_lanes_per_row < entries) ++params.log2_lanes_per_row;
  params.are_few = int64_t{params.batch} << params.log2_lanes_per_row <= info.warp_size;
  params.row_shift = static_cast<uint32_t>(warps / params.batch);
  params.rows_per_group = static_cast<int32_t>(divide_up(params.batch, threads));
  params.groups = static_cast<uint32_t>(divide_up(params.batch, params.rows_per_group));
  for (uint32_t step = 1; step < params.groups; step *= 2) params.largest_step = step;
  runtime.launch(call.is_dsv4 ? KernelId::kCopyPlannedDsv4 : KernelId::kCopyPlanned, &params, sizeof(params),
                 shape, call.device.index, call.stream);
}

void launch(LayerTokensCall& call) {
  LayerCopyParams& params = call.params;
  Runtime& runtime = runtime_of(call.device.kind);
  const DeviceInfo& info = runtime.device(call.device.index);
  const auto shared_bytes = [](int64_t threads) { return threads * static_cast<int64_t>(sizeof(TileLocs)); };
  const int64_t warps = call.block_size / info.warp_size;
  LaunchShape shape = block_of(call.block_size, warps, shared_bytes, info, call.device);
  if (params.layers == 0 || params.count == 0) return;

  // As many blocks as run at once, no more than there are layers times tokens for their warps.
  constexpr int64_t kThreadsPerMultiprocessor = 2048, kMaxParts = 65535;
  const int64_t at_once =
      std::max<int64_t>(1, kThreadsPerMultiprocessor / call.block_size) * info.multiprocessors;
  const int64_t blocks =
      std::min(divide_up(params.count, warps), std::max<int64_t>(1, at_once / params.layers));
  shape.blocks = static_cast<uint32_t>(blocks);
  shape.parts =
      static_cast<uint32_t>(std::min<int64_t>({params.layers, divide_up(at_once, blocks), kMaxParts}));
  params.layer_step = static_cast<int32_t>(shape.parts);
  params.shape = TileShape::make(Dsv4Layout::kItemBytes, info.warp_size, Dsv4Layout::kScaleBytes);
  params.items_per_tile = items_per_tile(Dsv4Layout::kItemBytes, info);
  runtime.launch(KernelId::kCopyLayersDsv4, &params, sizeof(params), shape, call.device.index, call.stream);
}

void launch(TranslateCall& call) {
  const TranslateParams& params = call.params;
  Runtime& runtime = runtime_of(call.device.kind);
  const DeviceInfo& info = runtime.device(call.device.index);
  if (params.count == 0) return;

  constexpr int64_t kBlocksPerMultiprocessor = 8;
  LaunchShape shape;
  shape.blocks = static_cast<uint32_t>(
      std::min(divide_up(params.count, kCopyThreads), kBlocksPerMultiprocessor * info.multiprocessors));
  shape.threads = kCopyThreads;
  runtime.launch(KernelId::kTranslate, &params, sizeof(params), shape, call.device.index, call.stream);
}

}  // namespace hisparse::host
