#pragma once

namespace hisparse::HISPARSE_TARGET {

struct BlockScan {
  uint32_t before;  // sum over the threads before this one
  uint32_t total;
};

// Exclusive sum over the threads of the block, with one block barrier. `warp_totals` are 32 words of shared
// memory.
__device__ __forceinline__ BlockScan block_exclusive_sum(uint32_t value, uint32_t* warp_totals) {
  const uint32_t lane = static_cast<uint32_t>(thread_index()) % kWarpSize;
  const uint32_t warp = static_cast<uint32_t>(thread_index()) / kWarpSize;
  const uint32_t warps = static_cast<uint32_t>(block_size()) / kWarpSize;
  const uint32_t inclusive = warp_inclusive_sum(value);
  if (lane == kWarpSize - 1) warp_totals[warp] = inclusive;
  block_barrier();
  const uint32_t warp_total = lane < warps ? warp_totals[lane] : 0;
  const uint32_t warps_before = warp_sum(lane < warp ? warp_total : 0);
  return {warps_before + inclusive - value, warp_sum(warp_total)};
}

}  // namespace hisparse::HISPARSE_TARGET
