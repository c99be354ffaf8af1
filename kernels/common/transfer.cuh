// The transfer of tokens between two pools, whatever their layouts.
#pragma once

#include "params.h"

namespace hisparse::HISPARSE_TARGET {

// The parts of a tile in shared memory, each put there by one lane; null where there is nothing to copy.
struct TileParts {
  using Index = int32_t;
  static constexpr int32_t kTailAt = kNoTail;

  TilePart* parts;  // [kWarpSize]

  __device__ __forceinline__ bool locate(Index part, int32_t at, const unsigned char*& from,
                                         unsigned char*& to) const {
    const TilePart located = parts[part];
    from = located.src + at;
    to = located.dst + at;
    return located.dst != nullptr;
  }
};

// A layout is a value and not a type here: the kernel would have to be compiled for 7 pairs of types, and
// computes the addresses of a tile, one per lane, in no more than a few percent of the time that its bytes
// need.
template <template <class> class Copy>
class Transfer {
 public:
  __device__ __forceinline__ explicit Transfer(const TransferParams& params)
      : p_(params), lane_(static_cast<uint32_t>(thread_index()) % kWarpSize) {
    // Neighbouring tiles go to different blocks: few tiles still use all of them.
    const int32_t warp =
        warp_uniform(static_cast<int32_t>(static_cast<uint32_t>(thread_index()) / kWarpSize));
    tile_ = static_cast<uint32_t>(warp * grid_size() + block_index());
    // A transfer of few items is over in 3 us on H200: it does not wait for a division that it does not need.
    if (tile_ >= p_.tiles) {
      plane_ = static_cast<int32_t>(tile_ / p_.tiles);
      tile_ %= p_.tiles;
    }
  }

  __device__ __forceinline__ void run() {
    if (plane_ >= p_.planes) return;
    load();
    find_plane();
    while (plane_ < p_.planes) {
      const TilePart part = locate();
      const auto count = static_cast<int32_t>(parts_of_tile());
      if constexpr (Copy<TileParts>::kCopiesOnePart) {
        // All lanes have found the same part.
        if (count == 1) {
          typename Copy<TileParts>::OnePart copy(part.src, part.dst, static_cast<int32_t>(lane_),
                                                 p_.shape.part_bytes);
          copy.start();
          advance();
          copy.finish();
          continue;
        }
      }
      advance();  // what it loads arrives while this tile is copied
      const TileParts parts{reinterpret_cast<TilePart*>(shared_memory()) +
                            (thread_index() - static_cast<int32_t>(lane_))};
      parts.parts[lane_] = part;
      warp_barrier();
      Copy<TileParts> copy(parts, count, p_.shape);
      copy.start(static_cast<int32_t>(lane_), kWarpSize);
      copy.finish();
      warp_barrier();
    }
  }

 private:
  __device__ __forceinline__ uint32_t parts_of_tile() const {
    const uint32_t left = p_.count - tile_ * p_.parts_per_tile;
    return left < p_.parts_per_tile ? left : p_.parts_per_tile;
  }

  // Goes to the warp's next tile.
  __device__ __forceinline__ void advance() {
    const int32_t plane = plane_;
    tile_ += p_.tile_step;
    plane_ += p_.plane_step;
    if (tile_ >= p_.tiles) {
      tile_ -= p_.tiles;
      ++plane_;
    }
    if (plane_ >= p_.planes) return;
    load();
    if (plane_ != plane) find_plane();
  }

  // Loads the indices of the lane's part of the current tile.
  __device__ __forceinline__ void load() {
    const uint32_t last = parts_of_tile() - 1;
    const uint32_t at = tile_ * p_.parts_per_tile + (lane_ < last ? lane_ : last);
    src_token_ = p_.src_indices[at];
    dst_token_ = p_.dst_indices[at];
    keep_loads_ahead();  // of what find_plane() looks up
  }

  __device__ __forceinline__ void find_plane() {
    // Another division that is only made where there is more than one plane.
    int32_t layer = 0;
    bool is_value = false;
    int64_t src_offset = 0, dst_offset = 0;
    if (plane_ > 0) {
      layer = plane_ / p_.heads;
      const int32_t head = plane_ - layer * p_.heads;
      is_value = layer >= p_.layers;
      if (is_value) layer -= p_.layers;
      src_offset = p_.src.layout.part_offset(layer, head);
      dst_offset = p_.dst.layout.part_offset(layer, head);
    }
    src_plane_ = pool(p_.src, is_value, layer) + src_offset;
    dst_plane_ = pool(p_.dst, is_value, layer) + dst_offset;
  }

  template <class Byte>
  __device__ __forceinline__ static Byte* pool(const TransferEnd<Byte>& end, bool is_value, int32_t layer) {
    const uint64_t* table = end.layer_tables[is_value];
    return table != nullptr ? reinterpret_cast<Byte*>(table[layer]) : end.pools[is_value];
  }

  __device__ __forceinline__ TilePart locate() const {
    const bool is_copied =
        src_token_ >= 0 && src_token_ < p_.src.tokens && dst_token_ >= 0 && dst_token_ < p_.dst.tokens;
    if (!is_copied) return {nullptr, nullptr};
    return {src_plane_ + p_.src.layout.token_offset(src_token_),
            dst_plane_ + p_.dst.layout.token_offset(dst_token_)};
  }

  const TransferParams& p_;
  const uint32_t lane_;
  int32_t plane_ = 0;
  uint32_t tile_;
  const unsigned char* src_plane_ = nullptr;
  unsigned char* dst_plane_ = nullptr;
  int64_t src_token_ = -1;
  int64_t dst_token_ = -1;
};

template <template <class> class Copy>
__device__ __forceinline__ void transfer(const TransferParams& params) {
  Transfer<Copy>(params).run();
}

}  // namespace hisparse::HISPARSE_TARGET
