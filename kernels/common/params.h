// The parameter structs of the kernels: plain data, filled by kernels/host, read by every target.
#pragma once

#include <cstdint>

#include "layouts.h"
#include "swap_in_layout.h"

namespace hisparse {

// The swap-in comes in three sizes: with 4 or 8 slots per thread, which stay in registers, and with any
// number.
enum class KernelId : int32_t {
  kSwapIn4,
  kSwapIn8,
  kSwapInAny,
  kCopyItems,
  kTransfer,
  kCheckSwapIn,
  kCheckIndices,
  kCount
};

inline constexpr const char* kKernelNames[] = {
    "hisparse_swap_in_4", "hisparse_swap_in_8",     "hisparse_swap_in_any",  "hisparse_copy_items",
    "hisparse_transfer",  "hisparse_check_swap_in", "hisparse_check_indices"};
static_assert(sizeof(kKernelNames) / sizeof(kKernelNames[0]) == static_cast<int>(KernelId::kCount));

inline constexpr int32_t kMaxHotBufferSize = 32768;  // slots are int16

// A pool of items: row `loc` starts at base + loc * item_size_bytes. Rows outside 0..rows-1 are never
// touched.
struct SourcePool {
  const unsigned char* base;
  int64_t rows;
};
struct DestinationPool {
  unsigned char* base;
  int64_t rows;
};

// Index vectors come as int32 or int64; the width is a property of the data, not of the kernel.
struct IndexVector {
  const void* data;
  int64_t is_int64;
};

// How `workers` threads walk over items as runs of equal words.
struct CopyShape {
  int32_t item_bytes;
  int32_t word_bytes;  // 16, 8, 4 or 1: what base addresses and item size are all multiples of
  int32_t words_per_item;
  int32_t item_step;  // a thread's next word is so many items
  int32_t word_step;  // and words further on

  static constexpr CopyShape make(int32_t item_bytes, int32_t word_bytes, int32_t workers) {
    const int32_t words = item_bytes / word_bytes;
    return {item_bytes, word_bytes, words, workers / words, workers % words};
  }
};

struct SwapInParams {
  const int32_t* top_k_tokens;  // [batch, >= num_top_k]
  int64_t top_k_stride;
  int32_t* top_k_device_locs;  // [batch, >= num_top_k]
  int64_t device_locs_stride;
  int32_t* device_buffer_tokens;  // [table_rows, >= hot_buffer_size + page_size]
  const int32_t* device_buffer_locs;
  int64_t buffer_table_stride;     // of both tables above
  const int64_t* host_cache_locs;  // [table_rows, max_tokens]
  int64_t host_locs_stride;
  int64_t max_tokens;
  int16_t* lru_slots;  // [table_rows, >= hot_buffer_size]
  int64_t lru_stride;
  int64_t table_rows;  // the smallest row count of the per-request tables
  IndexVector req_pool_indices;
  IndexVector seq_lens;
  const int32_t* num_real_reqs;  // null: every row is real
  int64_t* miss_src;             // the three plan pointers are null together
  int32_t* miss_dst;
  int32_t* miss_count;
  int64_t plan_stride;
  SourcePool host_cache;
  DestinationPool device_buffer;
  CopyShape copy;
  uint32_t* arrivals;  // [batch] zeroes where blocks_per_request > 1; every launch leaves them zero
  int32_t batch;
  int32_t num_top_k;
  int32_t hot_buffer_size;
  int32_t table_bits;   // log2 of the cells of the token table
  SwapInLayout layout;  // SwapInLayout::make(num_top_k, hot_buffer_size, table_bits, ...)
  int32_t blocks_per_request;
  int32_t slots_per_thread;    // at least 4, a multiple of 4
  int32_t entries_per_thread;  // at least 1
  int32_t rows_are_aligned;    // rows of device_buffer_tokens to 16 bytes, rows of lru_slots to 8
  int32_t skip_io;
};

struct CopyItemsParams {
  SourcePool src;
  DestinationPool dst;
  const int64_t* src_indices;
  const int64_t* dst_indices;
  int64_t count;
  CopyShape copy;
};

// How a warp moves a tile of parts as runs of equal words: of 16, 8, 4 or 1 bytes, as the addresses allow.
struct TileShape {
  int32_t part_bytes;
  CopyShape words[4];

  // Words that do not divide a part are left out: no address makes them right.
  static constexpr TileShape make(int32_t part_bytes, int32_t warp_size) {
    const auto shape = [&](int32_t word_bytes) {
      return part_bytes % word_bytes == 0 ? CopyShape::make(part_bytes, word_bytes, warp_size) : CopyShape{};
    };
    return {part_bytes, {shape(16), shape(8), shape(4), shape(1)}};
  }
};

// Where a part of a tile lies. A block keeps one per thread in shared memory.
struct TilePart {
  const unsigned char* src;
  unsigned char* dst;
};

// One end of a transfer: a pool of keys and one of values, or for each a table with the addresses of its
// layers.
template <class Byte>
struct TransferEnd {
  KvLayout layout;
  Byte* pools[2];
  const uint64_t* layer_tables[2];  // null: the pool holds the layers
  int64_t tokens;                   // tokens outside 0..tokens-1 are never touched
};

// A plane is one layer of keys or values, of one head where a layout keeps heads apart. It holds a part of
// every token, and a tile is a run of such parts that a warp moves together.
struct TransferParams {
  TransferEnd<const unsigned char> src;
  TransferEnd<unsigned char> dst;
  const int64_t* src_indices;
  const int64_t* dst_indices;
  uint32_t count;
  uint32_t tiles;      // of a plane
  uint32_t tile_step;  // a warp's next tile is so many tiles
  int32_t plane_step;  // and planes further on
  int32_t planes;
  int32_t layers;
  int32_t heads;
  uint32_t parts_per_tile;  // at most the warp size
  TileShape shape;
};

// What the sizes in registers are made for: this many top-k entries per thread.
inline constexpr int kEntriesInRegisters = 2;

}  // namespace hisparse
