// The parameter structs of the kernels: plain data, filled by kernels/host, read by every target.
#pragma once

#include <cstdint>

#include "item_layouts.h"
#include "layouts.h"
#include "swap_in_layout.h"

namespace hisparse {

// All kernels: identifier, name, parameters, and the function that a target compiles for it, with its own
// ItemCopy and TileCopy. The swap-in comes in three sizes: with 4 or 8 slots per thread, which stay in
// registers, and with any number.
#define HISPARSE_SWAP_IN_SIZES(KERNEL, id, name, ...)                      \
  KERNEL(id##4, name##_4, SwapInParams, swap_in<ItemCopy, __VA_ARGS__, 4>) \
  KERNEL(id##8, name##_8, SwapInParams, swap_in<ItemCopy, __VA_ARGS__, 8>) \
  KERNEL(id##Any, name##_any, SwapInParams, swap_in<ItemCopy, __VA_ARGS__, 0>)
#define HISPARSE_KERNELS(KERNEL)                                                                             \
  HISPARSE_SWAP_IN_SIZES(KERNEL, kSwapIn, hisparse_swap_in, LinearLayout, TokenSelection)                    \
  HISPARSE_SWAP_IN_SIZES(KERNEL, kDsv4SwapIn, hisparse_dsv4_swap_in, Dsv4Layout, TokenSelection)             \
  HISPARSE_SWAP_IN_SIZES(KERNEL, kBlockSwapIn, hisparse_block_swap_in, KeyValueLayout, BlockSelection)       \
  KERNEL(kCopyItems, hisparse_copy_items, CopyItemsParams, copy_items<ItemCopy>)                             \
  KERNEL(kCopyItemsPlainLoads, hisparse_copy_items_plain_loads, CopyItemsParams, copy_items<PlainLoadsCopy>) \
  KERNEL(kCopyItemsUngated, hisparse_copy_items_ungated, CopyItemsParams, copy_items<UngatedCopy>)           \
  KERNEL(kCopyPlanned, hisparse_copy_planned, PlannedCopyParams, copy_planned<TileCopy, LinearLayout>)       \
  KERNEL(kCopyPlannedDsv4, hisparse_copy_planned_dsv4, PlannedCopyParams,                                    \
         copy_planned<TileCopy, Dsv4Layout>)                                                                 \
  KERNEL(kCopyLayersDsv4, hisparse_copy_layers_dsv4, LayerCopyParams, copy_layers<TileCopy, Dsv4Layout>)     \
  KERNEL(kTransfer, hisparse_transfer, TransferParams, transfer<TileCopy>)                                   \
  KERNEL(kTranslate, hisparse_translate, TranslateParams, translate)                                         \
  KERNEL(kCheckSwapIn, hisparse_check_swap_in, SwapInCheckParams, check_swap_in)                             \
  KERNEL(kCheckIndices, hisparse_check_indices, IndexCheckParams, check_indices)

enum class KernelId : int32_t {
#define HISPARSE_KERNEL_ID(id, ...) id,
  HISPARSE_KERNELS(HISPARSE_KERNEL_ID)
#undef HISPARSE_KERNEL_ID
      kCount
};

inline constexpr const char* kKernelNames[] = {
#define HISPARSE_KERNEL_NAME(id, name, ...) #name,
    HISPARSE_KERNELS(HISPARSE_KERNEL_NAME)
#undef HISPARSE_KERNEL_NAME
};

// Which swap-in: by tokens from rows of items or from DeepSeek-V4 pages, or by blocks of tokens with keys and
// values.
enum class SwapInKind : int32_t { kTokens, kDsv4, kBlocks };

// `size` is the kernel for tokens.
constexpr KernelId swap_in_kernel(SwapInKind kind, KernelId size) {
  constexpr auto kSizes =
      static_cast<int32_t>(KernelId::kDsv4SwapIn4) - static_cast<int32_t>(KernelId::kSwapIn4);
  return static_cast<KernelId>(static_cast<int32_t>(size) + kSizes * static_cast<int32_t>(kind));
}
static_assert(swap_in_kernel(SwapInKind::kBlocks, KernelId::kSwapInAny) == KernelId::kBlockSwapInAny);

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
  uint32_t is_int64;
};

// How `workers` threads walk over items as runs of equal words.
struct CopyShape {
  int32_t item_bytes;
  int32_t word_bytes;      // 16, 8, 4 or 1: what base addresses and item size are all multiples of
  int32_t words_per_item;  // without a tail that lies apart
  int32_t item_step;       // a thread's next word is so many items
  int32_t word_step;       // and words further on
  int32_t widest_word;     // 16, or less where a benchmark wants it so

  static constexpr CopyShape make(int32_t item_bytes, int32_t word_bytes, int32_t workers,
                                  int32_t widest_word = 16, int32_t tail_bytes = 0) {
    const int32_t words = (item_bytes - tail_bytes) / word_bytes;
    return {item_bytes, word_bytes, words, workers / words, workers % words, widest_word};
  }
};

// Entries that ask for blocks of so many tokens. Rows have less than 2^15 entries, so that a multiplication
// divides.
struct TokenBlocks {
  uint32_t tokens;
  uint32_t reciprocal;

  static constexpr TokenBlocks make(uint32_t tokens) {
    return {tokens, static_cast<uint32_t>(((uint64_t{1} << 31) + tokens - 1) / tokens)};
  }
  constexpr uint32_t index_of(uint32_t entry) const {
    return static_cast<uint32_t>(uint64_t{entry} * reciprocal >> 31);
  }
};

// What the sizes in registers are made for: this many top-k entries per thread.
inline constexpr int kEntriesInRegisters = 2;

struct SwapInParams {
  const int32_t* top_k_tokens;  // [batch, >= num_top_k], or of blocks
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
  const unsigned char* host_values;  // where host_cache and device_buffer hold the keys alone
  unsigned char* device_values;
  TokenBlocks blocks;  // where blocks are asked for
  CopyShape copy;
  uint32_t* arrivals;  // [batch] zeroes where blocks_per_request > 1; every launch leaves them zero
  int32_t batch;
  int32_t num_top_k;
  int32_t hot_buffer_size;
  SwapInLayout layout;  // SwapInLayout::make(num_top_k, hot_buffer_size, ...)
  int32_t blocks_per_request;
  int32_t slots_per_thread;    // at least 4, a multiple of 4
  int32_t entries_per_thread;  // at least 1
  int32_t rows_are_aligned;    // rows of the slots: four slots of any table are one access
  int32_t runs_are_aligned;    // rows of the entries: so are kEntriesInRegisters entries
  int32_t skip_io;
};

// Only blocks of tokens have keys and values.
constexpr bool by_blocks(const SwapInParams& params) { return params.host_values != nullptr; }

struct CopyItemsParams {
  SourcePool src;
  DestinationPool dst;
  const int64_t* src_indices;
  const int64_t* dst_indices;
  int64_t count;
  CopyShape copy;
};

struct TranslateParams {
  IndexVector mapping;
  IndexVector locations;
  void* output;
  int64_t mapping_size;
  int64_t locations_stride;
  int64_t count;
  int32_t output_is_int64;
};

// How a warp moves a tile of parts as runs of equal words: of 16, 8, 4 or 1 bytes, as the addresses allow.
struct TileShape {
  int32_t part_bytes;
  CopyShape words[4];

  // Words that do not divide a part are left out: no address makes them right.
  static constexpr TileShape make(int32_t part_bytes, int32_t warp_size, int32_t tail_bytes = 0) {
    const auto shape = [&](int32_t word_bytes) {
      return (part_bytes - tail_bytes) % word_bytes == 0
                 ? CopyShape::make(part_bytes, word_bytes, warp_size, 16, tail_bytes)
                 : CopyShape{};
    };
    return {part_bytes, {shape(16), shape(8), shape(4), shape(1)}};
  }
};

// What a lane has in flight where a warp copies a single part on NVIDIA GPUs. In the same two blocks, two
// make 256 items of 4096 B from the host up to 20 us slower; eight do so by up to 0.3 us where four keep the
// link busy (H200).
inline constexpr int kPartLoads = 4;

// Where a part of a tile lies. A block keeps one per thread in shared memory.
struct TilePart {
  const unsigned char* src;
  unsigned char* dst;
};

// Where an item of a tile comes from and goes to. A block keeps one per thread in shared memory.
struct TileLocs {
  int64_t src;
  int64_t dst;
};

// A miss plan that another layer's swap-in recorded.
struct PlannedCopyParams {
  const int64_t* miss_src;  // [batch, plan_width]
  const int32_t* miss_dst;
  const int32_t* miss_count;  // [batch]
  const int32_t* num_real_reqs;
  int64_t plan_stride;
  SourcePool host_cache;
  DestinationPool device_buffer;
  TileShape shape;
  uint32_t items_per_tile;  // at most the warp size
  int32_t batch;
  int32_t plan_width;
  int32_t are_few;  // a warp has a lane for each entry that it may have to copy
  int32_t log2_lanes_per_row;
  uint32_t row_shift;  // of few rows, each begins so many warps before the one ahead of it
  int32_t rows_per_group;
  uint32_t groups;        // of rows, at most one per thread
  uint32_t largest_step;  // of a search among them: a power of two, at least half of them
  int32_t skip_io;

  // Shared memory: a tile per warp, where each group begins, and the totals of the warps.
  static constexpr int64_t shared_bytes(int64_t threads) {
    return threads * static_cast<int64_t>(sizeof(TileLocs) + 4) + 32 * 4;
  }
};

// Pools of all layers by address. Tokens with a negative index are left out.
struct LayerCopyParams {
  const uint64_t* src_ptrs;  // [layers]
  const uint64_t* dst_ptrs;
  const int64_t* src_indices;
  const int64_t* dst_indices;
  TileShape shape;
  uint32_t items_per_tile;  // at most the warp size
  uint32_t count;           // less than 2^31
  int32_t layers;
  int32_t layer_step;
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
  // First what the indices of a warp's first tile depend on: parameters are fetched by lines of 64 bytes, and
  // the other lines come while the indices are loaded.
  const int64_t* src_indices;
  const int64_t* dst_indices;
  uint32_t count;
  uint32_t tiles;           // of a plane
  uint32_t parts_per_tile;  // at most the warp size
  int32_t planes;
  uint32_t tile_step;  // a warp's next tile is so many tiles
  int32_t plane_step;  // and planes further on
  int32_t layers;
  int32_t heads;
  TransferEnd<const unsigned char> src;
  TransferEnd<unsigned char> dst;
  TileShape shape;
};

}  // namespace hisparse
