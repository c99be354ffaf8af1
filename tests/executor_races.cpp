// Small kernels with and without what orders their accesses, for test_thread_sanitizer.py. A line that it has
// to report says "race in" and the kernel's name.
#include <cstdio>
#include <cstring>

#define HISPARSE_TARGET races
#define HISPARSE_CPU_WARP_SIZE 32
#include "primitives.h"

namespace hisparse::races {
namespace {

constexpr int kThreads = 64, kBlocks = 3;

struct Params {
  uint32_t arrivals;
  int32_t words[kBlocks * kThreads];
};

int32_t* shared() { return reinterpret_cast<int32_t*>(shared_memory()); }
int other_warp() { return (thread_index() + kWarpSize) % kThreads; }
int same_warp() { return thread_index() ^ 1; }
int32_t* own_word(Params& params) { return params.words + block_index() * kThreads + thread_index(); }

void barrier_orders_block(Params& params) {
  shared()[thread_index()] = thread_index();
  block_barrier();
  *own_word(params) = shared()[other_warp()];
}

void nothing_orders_block(Params& params) {
  shared()[thread_index()] = thread_index();
  *own_word(params) = shared()[other_warp()];  // race in nothing_orders_block
}

void barrier_orders_warp(Params& params) {
  shared()[thread_index()] = thread_index();
  warp_barrier();
  *own_word(params) = shared()[same_warp()];
}

void warp_barrier_does_not_order_block(Params& params) {
  shared()[thread_index()] = thread_index();
  warp_barrier();
  *own_word(params) = shared()[other_warp()];  // race in warp_barrier_does_not_order_block
}

void sum_does_not_order_warp(Params& params) {
  shared()[thread_index()] = thread_index();
  warp_sum(1);
  *own_word(params) = shared()[same_warp()];  // race in sum_does_not_order_warp
}

// The reader is still behind the first barrier when the writer goes on to the second.
void barrier_does_not_order_what_follows(Params& params) {
  shared()[thread_index()] = thread_index();
  block_barrier();
  *own_word(params) = shared()[other_warp()];
  shared()[thread_index()] = 0;  // race in barrier_does_not_order_what_follows
  block_barrier();
}

void warp_barrier_does_not_order_what_follows(Params& params) {
  shared()[thread_index()] = thread_index();
  warp_barrier();
  *own_word(params) = shared()[same_warp()];
  shared()[thread_index()] = 0;  // race in warp_barrier_does_not_order_what_follows
  warp_barrier();
}

void atomics_need_no_order(Params& params) {
  uint32_t* const counter = reinterpret_cast<uint32_t*>(shared());
  if (thread_index() == 0) *counter = 0;
  block_barrier();
  device_fetch_add(counter, 1);
  block_barrier();
  *own_word(params) = static_cast<int32_t>(*counter);
}

void arrival_orders_blocks(Params& params) {
  *own_word(params) = 1;
  block_barrier();
  if (thread_index() == 0)
    shared()[0] = device_fetch_add(&params.arrivals, 1) == static_cast<uint32_t>(kBlocks) - 1;
  block_barrier();
  if (shared()[0])
    for (int block = 0; block < kBlocks; ++block) ++params.words[block * kThreads + thread_index()];
}

void nothing_orders_blocks(Params& params) {
  params.words[thread_index()] = 1;  // race in nothing_orders_blocks
}

using Function = void (*)(Params&);
template <Function function>
void kernel(const void* params) {
  function(**static_cast<Params* const*>(params));
}

struct Named {
  const char* name;
  cpu::Kernel kernel;
};
#define HISPARSE_NAMED(function) {#function, kernel<function>}
constexpr Named kKernels[] = {
    HISPARSE_NAMED(barrier_orders_block),
    HISPARSE_NAMED(nothing_orders_block),
    HISPARSE_NAMED(barrier_orders_warp),
    HISPARSE_NAMED(warp_barrier_does_not_order_block),
    HISPARSE_NAMED(sum_does_not_order_warp),
    HISPARSE_NAMED(barrier_does_not_order_what_follows),
    HISPARSE_NAMED(warp_barrier_does_not_order_what_follows),
    HISPARSE_NAMED(atomics_need_no_order),
    HISPARSE_NAMED(arrival_orders_blocks),
    HISPARSE_NAMED(nothing_orders_blocks),
};

}  // namespace
}  // namespace hisparse::races

int main(int, char** arguments) {
  using namespace hisparse;
  for (const races::Named& named : races::kKernels) {
    if (std::strcmp(named.name, arguments[1]) != 0) continue;
    // Twice, in order and in a random order: what one launch did comes before the next.
    static races::Params params;
    races::Params* const address = &params;
    for (const cpu::Schedule& schedule : {cpu::Schedule{{}, true}, cpu::Schedule{5, true}}) {
      params = {};
      cpu::run_grid(named.kernel, &address, {races::kBlocks, 1, races::kThreads, races::kWarpSize, 1024},
                    schedule);
    }
    std::puts("done");
    return 0;
  }
  return 1;
}
