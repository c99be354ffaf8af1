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

inline int64_t divide_up(int64_t value, int64_t divisor) { return value / divisor + (value % divisor != 0); }

// On a GPU block_size is the least: a block of a large hot buffer gets one thread for four slots, as far as
// it goes.
inline int swap_in_threads(const DeviceInfo& device, int block_size, int hot_buffer_size) {
  constexpr int kSlotsPerThread = 4;
  const int warps =
      static_cast<int>(divide_up(divide_up(hot_buffer_size, kSlotsPerThread), device.warp_size));
  return std::min(std::max(block_size, warps * device.warp_size), device.max_threads_per_block);
}

// One block keeps only part of the link busy. Small batches get several blocks per request, so that about
// eight blocks copy, but never more blocks than run at once.
inline int swap_in_blocks_per_request(const DeviceInfo& device, int batch) {
  constexpr int kBlocksForTheLink = 8;
  const int wanted = static_cast<int>(divide_up(kBlocksForTheLink, batch));
  return std::max(1, std::min(wanted, device.multiprocessors / batch));
}

// Which size of the kernel a block of so many threads takes, and how it deals out a row.
struct SwapInShape {
  KernelId kernel;
  int32_t slots_per_thread, entries_per_thread;
};
inline SwapInShape swap_in_shape(int threads, int num_top_k, int hot_buffer_size) {
  const auto entries = static_cast<int32_t>(divide_up(num_top_k, threads));
  const auto slots = static_cast<int32_t>(4 * divide_up(divide_up(hot_buffer_size, threads), 4));
  if (entries > kEntriesInRegisters || slots > 8) return {KernelId::kSwapInAny, slots, entries};
  return {slots == 4 ? KernelId::kSwapIn4 : KernelId::kSwapIn8, slots, kEntriesInRegisters};
}

// The token table probes fastest when seven eighths of it are empty (0.2-1.2 us over four times the entries
// on H200), and shrinks where shared memory is short. Where even the smallest does not fit, the result is
// that one.
inline int swap_in_table_bits(const DeviceInfo& device, int num_top_k, int hot_buffer_size) {
  const int least = SwapInLayout::min_table_bits(num_top_k);
  int bits = least;
  while (bits < SwapInLayout::kMaxTableBits && (int64_t{1} << bits) < int64_t{8} * num_top_k) ++bits;
  while (bits > least &&
         SwapInLayout::make(num_top_k, hot_buffer_size, bits).bytes > device.shared_memory_bytes)
    --bits;
  return bits;
}

// A warp moves one item at a time: no more warps than items, and no more blocks than it takes to hide the
// latency.
inline int64_t copy_blocks(const DeviceInfo& device, int64_t count) {
  constexpr int64_t kBlocksPerMultiprocessor = 4;
  return std::min(divide_up(count, kCopyThreads / device.warp_size),
                  kBlocksPerMultiprocessor * device.multiprocessors);
}

}  // namespace hisparse::host
