// Checked calls of hisparse.kvcacheio on their way to a kernel or the copy engine. Nothing here touches
// Python objects.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "../common/params.h"
#include "device.h"
#include "launcher.h"

namespace hisparse::host {

// A transfer by a kernel. What is left of params is the launch shape, and host addresses to resolve.
struct TransferCall {
  TransferParams params{};
  PoolMemory src[2], dst[2];
  Device device;
  void* stream = nullptr;
  int64_t part_bytes = 0;
  int64_t layer_id = 0;     // of the first layer in the source
  int64_t block_quota = 0;  // 0: by device
  int64_t num_warps_per_block = 0;
};

// One layer of keys or values for the copy engine: position p of either side starts p strides behind its
// base.
struct DirectPlane {
  const unsigned char* src;
  unsigned char* dst;
  int64_t src_stride, dst_stride;
  int64_t token_bytes;
};

// `length` tokens from one position on, alike in all planes.
struct DirectRun {
  int64_t src, dst, length;
};

struct DirectIndices {
  const char* argument = nullptr;
  const int64_t* data = nullptr;
  bool on_device = false;
  bool of_pages = false;  // the side is page first: a position is a page, and indices name its first token
  int64_t tokens = 0;
};

struct DirectCall {
  std::vector<DirectPlane> planes;
  std::vector<DirectRun> runs;  // where there are no indices
  DirectIndices src, dst;
  int64_t count = 0;
  int64_t page_size = 1;
  std::vector<std::pair<const void*, PoolMemory>> memory;  // every tensor
  std::deque<std::string> names;                           // their arguments
  Device device;
  void* stream = nullptr;
};

struct LayerCopyCall {
  const uint64_t* data_ptrs = nullptr;
  const int64_t* strides = nullptr;
  const int64_t* targets = nullptr;
  const int64_t* sources = nullptr;
  int64_t layers = 0, count = 0;
};

void launch(TransferCall& call);
void launch(DirectCall& call);
void launch(LayerCopyCall& call);

// The address at which kernels on a device of this machine reach host memory: the address itself where the
// machine has no device. Of two vendors' devices `prefers_rocm` says which are meant. std::invalid_argument
// where they don't reach it, or there is no such device.
uintptr_t device_accessible_address(const void* host, const PoolMemory& memory, int64_t device_index,
                                    bool prefers_rocm);

}  // namespace hisparse::host
