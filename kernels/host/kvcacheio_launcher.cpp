#include "kvcacheio_launcher.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "content_check.h"
#include "errors.h"
#include "launch_policy.h"
#include "resolve.h"

namespace hisparse::host {
namespace {

constexpr size_t kCopiesAtOnce = 8192;  // bounds the memory that a long list takes

int64_t default_block_quota(DeviceKind kind) { return kind == DeviceKind::kRocm ? 16 : 2; }
int64_t default_warps_per_block(DeviceKind kind) { return kind == DeviceKind::kCuda ? 32 : 16; }

void check_warps(int64_t warps, const DeviceInfo& info, Device device) {
  const int64_t most = info.max_threads_per_block / info.warp_size;
  if (warps > most) {
    value_error("num_warps_per_block",
                text("at most ", most, " warps of ", info.warp_size, " threads on ", to_string(device)),
                std::to_string(warps));
  }
}

// The warps of a block and the parts of a tile, at most.
struct TransferShape {
  int64_t warps, parts_per_tile;
};

TransferShape transfer_shape(const TransferCall& call, const DeviceInfo& info, int64_t blocks,
                             int64_t warps) {
  const int64_t parts = int64_t{call.params.count} * call.params.planes;
  const int64_t part_bytes = call.part_bytes;
  const int64_t largest_tile = std::min(
      {std::max<int64_t>(kTileBytes / part_bytes, 1), int64_t{call.params.count}, int64_t{info.warp_size}});
  const bool from_host = call.src[0].on_host, to_host = call.dst[0].on_host;

  // On an NVIDIA GPU a warp begins a tile of one part sooner, but has less in flight than with a larger one.
  // That is up to 0.8 us faster for 256 items where all warps together keep the link busy, with what it moves
  // in 1.2 us to the host and in 2.5 us from it. With half as much in flight they take up to 0.8 us longer to
  // the host and 6 us from it (H200). The start of a longer transfer matters less, and it needs more in
  // flight where it reads from a large range of host memory.
  constexpr int64_t kToHost = 64 << 10, kFromHost = 128 << 10;  // bytes
  constexpr int64_t kPartsPerWarp = 8;                          // more were not measured
  const bool may_take_single_parts =
      call.device.kind == DeviceKind::kCuda && (from_host || to_host) && part_bytes % 16 == 0;
  const int64_t in_flight = std::min<int64_t>(part_bytes, kPartLoads * 16 * info.warp_size);
  const auto takes_single_parts = [&](int64_t of_block) {
    const int64_t at_work = blocks * of_block;
    return may_take_single_parts && parts <= at_work * kPartsPerWarp &&
           at_work * in_flight >= (from_host ? kFromHost : kToHost);
  };

  // Fewer warps begin sooner, too: 256 items of 1152 B to the host in two blocks of 16 warps need 6.0 us, and
  // with 32 warps 6.3.
  const int64_t few = std::min<int64_t>(warps, 16);
  if (takes_single_parts(few)) return {few, 1};
  const bool is_one_round = parts <= blocks * warps * largest_tile;
  if (to_host && is_one_round) return {few, largest_tile};
  return {warps, takes_single_parts(warps) ? 1 : largest_tile};
}

// The indices as the host sees them, in `storage` where they have to be fetched.
const int64_t* on_host(const DirectIndices& indices, int64_t count, std::vector<int64_t>& storage,
                       Runtime& runtime, const DirectCall& call) {
  if (!indices.on_device) return indices.data;
  if (runtime.captures(call.device.index, call.stream)) {
    throw std::runtime_error(
        text(indices.argument,
             ": indices on the device are read on the host, which a graph cannot capture: "
             "pass them on the CPU"));
  }
  storage.resize(static_cast<size_t>(count));
  runtime.read(storage.data(), indices.data, storage.size() * sizeof(int64_t), call.device.index,
               call.stream);
  return storage.data();
}

void check_range(const DirectIndices& indices, const int64_t* values, int64_t count, int64_t page_size,
                 bool in_pages) {
  const auto refuse = [&](const std::string& expected, int64_t at) {
    value_error(indices.argument, expected, text(values[at], " at position ", at));
  };
  for (int64_t i = 0; i < count; ++i)
    if (values[i] < 0) refuse("indices of at least 0", i);
  const int64_t step = in_pages ? page_size : 1;
  for (int64_t i = 0; i < count; i += step) {
    if (indices.of_pages && values[i] % page_size != 0)
      refuse(text("pages that start at a multiple of page_size = ", page_size), i);
    if (values[i] > indices.tokens - step)
      refuse(text(in_pages ? "pages" : "indices", " within ", indices.tokens, " tokens"), i);
  }
}

std::vector<DirectRun> runs_of(const DirectCall& call, const int64_t* src, const int64_t* dst) {
  std::vector<DirectRun> runs;
  if (call.src.of_pages || call.dst.of_pages) {
    for (int64_t i = 0; i < call.count; i += call.page_size) {
      runs.push_back({call.src.of_pages ? src[i] / call.page_size : src[i],
                      call.dst.of_pages ? dst[i] / call.page_size : dst[i], call.page_size});
    }
    return runs;
  }
  for (int64_t i = 0; i < call.count; ++i) {
    if (i > 0 && src[i] == src[i - 1] + 1 && dst[i] == dst[i - 1] + 1) {
      ++runs.back().length;
    } else {
      runs.push_back({src[i], dst[i], 1});
    }
  }
  return runs;
}

}  // namespace

void launch(TransferCall& call) {
  TransferParams& params = call.params;
  Runtime& runtime = runtime_of(call.device.kind);
  const DeviceInfo& info = runtime.device(call.device.index);
  int64_t warps = call.num_warps_per_block;
  if (warps == 0) warps = default_warps_per_block(call.device.kind);
  check_warps(warps, info, call.device);
  for (int side = 0; side < 2; ++side) {
    resolve(params.src.pools[side], call.src[side], runtime, call.device);
    resolve(params.dst.pools[side], call.dst[side], runtime, call.device);
    if (params.src.pools[side] != nullptr)
      params.src.pools[side] += params.src.layout.part_offset(call.layer_id, 0);
  }
  if (params.count == 0) return;
  if (checks_contents()) {
    check_indices(params.src_indices, params.dst_indices, params.count, params.src.tokens, params.dst.tokens,
                  {runtime, info, call.device, call.stream});
  }

  int64_t quota = call.block_quota > 0 ? call.block_quota : default_block_quota(call.device.kind);
  quota = std::min(quota, kMaxBlocks);
  const TransferShape most = transfer_shape(call, info, quota, warps);
  warps = most.warps;
  // Tiles as large as may be, but so that all warps have as many: else the rest of a round waits for a few.
  const int64_t parts = int64_t{params.count} * params.planes;
  const int64_t rounds = divide_up(parts, quota * warps * most.parts_per_tile);
  params.parts_per_tile =
      static_cast<uint32_t>(std::min(divide_up(parts, quota * warps * rounds), most.parts_per_tile));
  params.tiles = static_cast<uint32_t>(divide_up(params.count, params.parts_per_tile));
  const int64_t tiles = int64_t{params.tiles} * params.planes;
  const int64_t blocks = std::min(quota, tiles);
  warps = std::min(warps, divide_up(tiles, blocks));
  params.plane_step = static_cast<int32_t>(blocks * warps / params.tiles);
  params.tile_step = static_cast<uint32_t>(blocks * warps % params.tiles);
  params.shape = TileShape::make(static_cast<int32_t>(call.part_bytes), info.warp_size);

  LaunchShape shape;
  shape.blocks = static_cast<uint32_t>(blocks);
  shape.threads = static_cast<uint32_t>(warps * info.warp_size);
  shape.shared_bytes = shape.threads * sizeof(TilePart);
  runtime.launch(KernelId::kTransfer, &params, sizeof(params), shape, call.device.index, call.stream);
}

void launch(DirectCall& call) {
  Runtime& runtime = runtime_of(call.device.kind);
  runtime.device(call.device.index);
  for (const auto& [address, memory] : call.memory) {
    auto* base = static_cast<const unsigned char*>(address);
    resolve(base, memory, runtime,
            call.device);  // the copy engine takes host addresses, but has to reach them
  }
  if (call.count > 0) {
    std::vector<int64_t> storage[2];
    const int64_t* src = on_host(call.src, call.count, storage[0], runtime, call);
    const int64_t* dst = on_host(call.dst, call.count, storage[1], runtime, call);
    const bool in_pages = call.src.of_pages || call.dst.of_pages;
    check_range(call.src, src, call.count, call.page_size, in_pages);
    check_range(call.dst, dst, call.count, call.page_size, in_pages);
    call.runs = runs_of(call, src, dst);
  }
  CopyList copies;
  for (const DirectRun& run : call.runs) {
    for (const DirectPlane& plane : call.planes) {
      const int64_t bytes = run.length * plane.token_bytes;
      if (bytes == 0) continue;
      copies.add(plane.dst + run.dst * plane.dst_stride, plane.src + run.src * plane.src_stride,
                 static_cast<size_t>(bytes));
      if (copies.size() < kCopiesAtOnce) continue;
      runtime.copy(copies, call.device.index, call.stream);
      copies.clear();
    }
  }
  if (copies.size() > 0) runtime.copy(copies, call.device.index, call.stream);
}

void launch(LayerCopyCall& call) {
  std::vector<DirectRun> pairs;
  std::vector<int64_t> targets;
  for (int64_t i = 0; i < call.count; ++i) {
    if (call.sources[i] < 0 || call.targets[i] < 0) continue;
    pairs.push_back({call.sources[i], call.targets[i], 1});
    targets.push_back(call.targets[i]);
  }
  std::sort(targets.begin(), targets.end());
  const bool overlaps = std::any_of(pairs.begin(), pairs.end(), [&](const DirectRun& pair) {
    return std::binary_search(targets.begin(), targets.end(), pair.src);
  });

  // All room before the first copy: where there is not enough, nothing has changed.
  std::vector<unsigned char> rows;
  if (overlaps && call.layers > 0) {
    const auto widest = static_cast<uint64_t>(*std::max_element(call.strides, call.strides + call.layers));
    if (widest > rows.max_size() / pairs.size()) throw std::bad_alloc();
    rows.resize(pairs.size() * widest);
  }
  for (int64_t layer = 0; layer < call.layers; ++layer) {
    auto* base = reinterpret_cast<unsigned char*>(static_cast<uintptr_t>(call.data_ptrs[layer]));
    const int64_t bytes = call.strides[layer];
    const auto row = [&](int64_t loc) { return base + loc * bytes; };
    const auto copy = [&](unsigned char* to, const unsigned char* from) {
      std::memcpy(to, from, static_cast<size_t>(bytes));
    };
    if (!overlaps) {
      for (const DirectRun& pair : pairs) copy(row(pair.dst), row(pair.src));
      continue;
    }
    unsigned char* next = rows.data();
    for (const DirectRun& pair : pairs) copy(std::exchange(next, next + bytes), row(pair.src));
    next = rows.data();
    for (const DirectRun& pair : pairs) copy(row(pair.dst), std::exchange(next, next + bytes));
  }
}

uintptr_t device_accessible_address(const void* host, const PoolMemory& memory, int64_t device_index,
                                    bool prefers_rocm) {
  const std::optional<DeviceKind> kind = gpu_kind(prefers_rocm);
  if (!kind) return reinterpret_cast<uintptr_t>(host);
  Runtime& runtime = runtime_of(*kind);
  const int count = runtime.device_count();
  if (device_index >= count) {
    value_error("device_index", text("0 to ", count - 1), std::to_string(device_index));
  }
  auto* base = static_cast<const unsigned char*>(host);
  resolve(base, memory, runtime, {*kind, static_cast<int>(device_index)});
  return reinterpret_cast<uintptr_t>(base);
}

}  // namespace hisparse::host
