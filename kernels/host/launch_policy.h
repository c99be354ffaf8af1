// How many threads and blocks a launch gets.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/swap_in_layout.h"
#include "runtime.h"

namespace hisparse::host {

inline constexpr int kMaxBlocksPerRequest = 64;
inline constexpr int kCopyThreads = 256;
inline constexpr int64_t kMaxCopyBlocks = 65535;
inline constexpr int64_t kTileBytes = 12 << 10;  // a warp copies such a tile in four rounds of six loads

inline int64_t divide_up(int64_t value, int64_t divisor) { return value / divisor + (value % divisor != 0); }

// On a GPU block_size is the least: a block of a large hot buffer gets one thread for four slots, as far as
// it goes.
inline int swap_in_threads(const DeviceInfo& device, int block_size, int hot_buffer_size) {
  constexpr int kSlotsPerThread = 4;
  const int warps =
      static_cast<int>(divide_up(divide_up(hot_buffer_size, kSlotsPerThread), device.warp_size));
  return std::min(std::max(block_size, warps * device.warp_size), device.max_threads_per_block);
}

// One block keeps only part of the link busy: where up to three requests are all there is, eight blocks share
// the copying of each, but no more than have a word of 16 bytes for every thread if all entries miss. That
// saves 3.9 us and more of one request with 20 % misses, 0.1 us and more of three, and costs up to 0.2 us
// where little or nothing misses (H200, H=4096). Of four requests it saves next to nothing.
inline int swap_in_blocks_per_request(const DeviceInfo& device, int batch, int64_t bytes_if_all_miss,
                                      int threads) {
  if (batch > 3) return 1;
  const int64_t shared_by = std::min<int64_t>(8, device.multiprocessors / batch);
  return static_cast<int>(
      std::max<int64_t>(1, std::min(shared_by, divide_up(bytes_if_all_miss, 16 * threads))));
}

// How one block works on a row: which size of the kernel, what each thread looks after, and the shared
// memory.
struct SwapInShape {
  int threads;
  KernelId kernel;
  int32_t slots_per_thread, entries_per_thread;
  SwapInLayout layout;
};

// The token table has a cell for every token of a sequence up to this length, where shared memory allows.
inline constexpr int64_t kMaxCells = 1 << 17;

// Where even the smallest table does not fit, the result is that one.
inline SwapInShape swap_in_shape_for(const DeviceInfo& device, int threads, int num_top_k,
                                     int hot_buffer_size, int64_t max_tokens) {
  SwapInShape shape{};
  shape.threads = threads;
  shape.entries_per_thread = static_cast<int32_t>(divide_up(num_top_k, threads));
  shape.slots_per_thread = static_cast<int32_t>(4 * divide_up(divide_up(hot_buffer_size, threads), 4));
  const bool staged = shape.entries_per_thread > kEntriesInRegisters || shape.slots_per_thread > 8;
  shape.kernel = staged                        ? KernelId::kSwapInAny
                 : shape.slots_per_thread == 4 ? KernelId::kSwapIn4
                                               : KernelId::kSwapIn8;
  shape.layout = SwapInLayout::make(num_top_k, hot_buffer_size,
                                    staged ? 0 : static_cast<uint32_t>(threads * kEntriesInRegisters),
                                    static_cast<uint32_t>(device.shared_memory_bytes),
                                    static_cast<uint32_t>(std::min(max_tokens, kMaxCells)));
  return shape;
}

// More threads keep more of a row in registers: where shared memory is too small otherwise, as many as there
// can be.
inline SwapInShape swap_in_shape(const DeviceInfo& device, int threads, int num_top_k, int hot_buffer_size,
                                 int64_t max_tokens) {
  const SwapInShape shape = swap_in_shape_for(device, threads, num_top_k, hot_buffer_size, max_tokens);
  if (shape.layout.bytes <= device.shared_memory_bytes) return shape;
  const SwapInShape wider =
      swap_in_shape_for(device, device.max_threads_per_block, num_top_k, hot_buffer_size, max_tokens);
  return wider.layout.bytes < shape.layout.bytes ? wider : shape;
}

// A warp moves one item at a time: no more warps than items, and no more blocks than it takes to hide the
// latency.
inline int64_t copy_blocks(const DeviceInfo& device, int64_t count) {
  constexpr int64_t kBlocksPerMultiprocessor = 4;
  return std::min(divide_up(count, kCopyThreads / device.warp_size),
                  kBlocksPerMultiprocessor * device.multiprocessors);
}

}  // namespace hisparse::host
