// The SIMT executor of the CPU target: every GPU thread of a block is a fiber, blocks run one after another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace hisparse::cpu {

using Kernel = void (*)(const void* params);

struct Grid {
  uint32_t blocks;  // of one part
  uint32_t parts;
  uint32_t threads;
  int warp_size;
  size_t shared_bytes;
};

struct Schedule {
  std::optional<uint64_t>
      seed;     // unset: blocks and threads run in order; set: in a random order that the seed repeats
  bool strict;  // threads that left before a barrier or warp operation are an error
};

// Throws std::runtime_error with the source line where the kernel breaks the rules of its target: a warp
// operation in divergent code, a deadlock, and, in strict mode, a barrier that some threads never reach.
void run_grid(Kernel kernel, const void* params, const Grid& grid, const Schedule& schedule);

// What the primitives are made of; valid inside a kernel only.
struct Place {
  const char* file;
  int line;
};
uint32_t thread_index();
uint32_t block_index();
uint32_t block_part();
uint32_t block_size();
uint32_t grid_size();
unsigned char* shared_memory();
void block_barrier(Place place);

// Rendezvous of the calling thread's warp. warp_sum returns the sum of the values that its first `lanes`
// lanes brought (0 for lanes that left), and orders no other memory access; warp_barrier does.
uint64_t warp_sum(uint64_t value, int lanes, Place place);
void warp_barrier(Place place);

}  // namespace hisparse::cpu
