#include "executor.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define HISPARSE_DEFINE_FIBER_SWITCH
#include "fiber_switch.h"
#include "sanitizer_fibers.h"

namespace hisparse::cpu {
namespace {

constexpr int kMaxWarpSize = 64;
constexpr unsigned char kSharedGarbage = 0xA5;
constexpr size_t kRedZone = 256;  // behind the shared memory, for AddressSanitizer

std::string to_text(Place place) { return std::string(place.file) + ":" + std::to_string(place.line); }

// Zeroed pages that only grow.
class Pages {
 public:
  Pages() = default;
  ~Pages() { release(); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  unsigned char* base() const { return base_; }
  size_t bytes() const { return bytes_; }

  // True where they are new.
  bool reserve(size_t bytes) {
    if (bytes <= bytes_) return false;
    release();
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<unsigned char*>(memory);
    bytes_ = bytes;
    return true;
  }

  void release() {
    if (base_ != nullptr) munmap(base_, bytes_);
    base_ = nullptr;
    bytes_ = 0;
  }

 private:
  unsigned char* base_ = nullptr;
  size_t bytes_ = 0;
};

// All stacks of a thread, a guard page below each.
class StackPool {
 public:
  unsigned char* stack(size_t index) { return pages_.base() + index * pitch() + page_; }
  size_t stack_bytes() const { return kFiberStackBytes; }

  void reserve(size_t count) {
    if (!pages_.reserve(count * pitch())) return;
    for (size_t i = 0; i < count; ++i) mprotect(pages_.base() + i * pitch(), page_, PROT_NONE);
  }
  void release() { pages_.release(); }

 private:
  size_t pitch() const { return kFiberStackBytes + page_; }

  size_t page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  Pages pages_;
};

enum class Wait { kNone, kBlock, kWarp };

struct Fiber {
  void* stack_pointer;
  SanitizerFiber sanitizer;
  Wait wait;
  Place place;
};

struct Warp {
  // A lane cannot be two rendezvous ahead of another, so two sets of values are enough.
  uint64_t values[2][kMaxWarpSize];
  SyncPoint barriers[2];
  int parity;
  int arrived;
  int live;
  int size;
};

class BlockRunner {
 public:
  void run(Kernel kernel, const void* params, const Grid& grid, const Schedule& schedule);

  uint32_t thread() const { return current_; }
  uint32_t block() const { return block_; }
  const Grid& grid() const { return grid_; }
  unsigned char* shared() { return shared_; }

  void block_barrier(Place place);
  uint64_t warp_sum(uint64_t value, int lanes, Place place);
  void warp_barrier(Place place);

 private:
  static void fiber_entry();
  void run_block();
  void leave();
  [[noreturn]] void fail(const std::string& message);
  [[noreturn]] void return_to_scheduler();
  int meet_warp(uint64_t value, Place place);
  uint32_t take_ready();
  void resume_next();
  void release_block();
  void release_warp(uint32_t warp);
  void make_ready(uint32_t thread) {
    fibers_[thread].wait = Wait::kNone;
    ready_[(ready_head_ + ready_count_++) % grid_.threads] = thread;
  }
  uint32_t warp_of(uint32_t thread) const { return thread / static_cast<uint32_t>(grid_.warp_size); }

  Kernel kernel_ = nullptr;
  const void* params_ = nullptr;
  Grid grid_{};
  Schedule schedule_{};
  std::mt19937_64 random_;
  StackPool stacks_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<uint32_t> ready_;  // a ring: ready_count_ threads from ready_head_ on
  uint32_t ready_head_ = 0;
  uint32_t ready_count_ = 0;
  Pages shared_pages_;
  unsigned char* shared_ = nullptr;
  SyncPoint started_, finished_;
  SyncPoint block_barriers_[2];  // a thread cannot be two barriers ahead of another
  int block_parity_ = 0;
  void* scheduler_stack_pointer_ = nullptr;
  SanitizerFiber scheduler_sanitizer_;
  uint32_t block_ = 0;
  uint32_t current_ = 0;
  uint32_t live_ = 0;
  uint32_t at_barrier_ = 0;
  std::string error_;
};

thread_local BlockRunner* running = nullptr;

void BlockRunner::run(Kernel kernel, const void* params, const Grid& grid, const Schedule& schedule) {
  kernel_ = kernel;
  params_ = params;
  grid_ = grid;
  schedule_ = schedule;
  if (schedule.seed) random_.seed(*schedule.seed);
  fibers_.resize(grid.threads);
  ready_.resize(grid.threads);
  warps_.resize((grid.threads + static_cast<uint32_t>(grid.warp_size) - 1) /
                static_cast<uint32_t>(grid.warp_size));

  std::vector<uint32_t> order(grid.blocks * grid.parts);
  std::iota(order.begin(), order.end(), 0u);
  if (schedule.seed) std::shuffle(order.begin(), order.end(), random_);
  for (uint32_t block : order) {
    block_ = block;
    run_block();
    if (!error_.empty()) throw std::runtime_error(std::exchange(error_, {}));
  }
  finished_.acquire();
}

void BlockRunner::run_block() {
  stacks_.reserve(grid_.threads);
  shared_pages_.reserve(grid_.shared_bytes + kRedZone);
  shared_ = shared_pages_.base();
  // For AddressSanitizer shared memory ends at the byte that the launch asked for.
  const SharedMemoryGuard guard(shared_, shared_pages_.bytes(), shared_, grid_.shared_bytes);
  if (grid_.shared_bytes > 0) std::memset(shared_, kSharedGarbage, grid_.shared_bytes);
  const auto warp_size = static_cast<uint32_t>(grid_.warp_size);
  for (uint32_t w = 0; w < warps_.size(); ++w) {
    const int lanes = static_cast<int>(std::min(warp_size, grid_.threads - w * warp_size));
    warps_[w] = Warp{{}, {}, 0, 0, lanes, lanes};
  }
  ready_head_ = ready_count_ = 0;
  live_ = grid_.threads;
  at_barrier_ = 0;
  for (uint32_t t = 0; t < grid_.threads; ++t) {
    fibers_[t].stack_pointer =
        prepare_stack(stacks_.stack(t), stacks_.stack_bytes(), &BlockRunner::fiber_entry);
    fibers_[t].sanitizer.create(stacks_.stack(t), stacks_.stack_bytes());
    make_ready(t);
  }
  started_.release();
  running = this;
  current_ = take_ready();
  scheduler_sanitizer_.before_switch(fibers_[current_].sanitizer);
  hisparse_switch_stack(&scheduler_stack_pointer_, fibers_[current_].stack_pointer);
  scheduler_sanitizer_.after_switch();
  running = nullptr;
  for (Fiber& fiber : fibers_) fiber.sanitizer.destroy();
  if (!kBlocksShareMemory) {
    stacks_.release();
    shared_pages_.release();
  }
}

void BlockRunner::fiber_entry() {
  BlockRunner* runner = running;
  runner->fibers_[runner->current_].sanitizer.after_switch();
  runner->started_.acquire();
  runner->kernel_(runner->params_);
  runner->finished_.release();
  runner->leave();
}

void BlockRunner::leave() {
  const uint32_t w = warp_of(current_);
  --live_;
  --warps_[w].live;
  if (schedule_.strict && at_barrier_ > 0) {
    const auto waiting =
        std::find_if(fibers_.begin(), fibers_.end(), [](const Fiber& f) { return f.wait == Wait::kBlock; });
    fail("thread " + std::to_string(current_) +
         " left the kernel while others wait at the block barrier at " + to_text(waiting->place));
  }
  if (warps_[w].arrived > 0) {
    if (schedule_.strict) {
      const auto first =
          fibers_.begin() + static_cast<std::ptrdiff_t>(w * static_cast<uint32_t>(grid_.warp_size));
      const auto waiting =
          std::find_if(first, fibers_.end(), [](const Fiber& f) { return f.wait == Wait::kWarp; });
      fail("thread " + std::to_string(current_) + " left the kernel while its warp waits at " +
           to_text(waiting->place));
    }
    if (warps_[w].arrived == warps_[w].live) release_warp(w);
  }
  if (live_ > 0 && at_barrier_ == live_) release_block();
  resume_next();
}

void BlockRunner::block_barrier(Place place) {
  if (schedule_.strict && live_ < grid_.threads)
    fail("block barrier at " + to_text(place) + " after " + std::to_string(grid_.threads - live_) +
         " threads have left the kernel");
  fibers_[current_].place = place;
  fibers_[current_].wait = Wait::kBlock;
  SyncPoint& barrier = block_barriers_[block_parity_];
  barrier.release();
  ++at_barrier_;
  if (at_barrier_ == live_) release_block();
  resume_next();
  barrier.acquire();
}

void BlockRunner::warp_barrier(Place place) {
  Warp& warp = warps_[warp_of(current_)];
  SyncPoint& barrier = warp.barriers[warp.parity];
  barrier.release();
  meet_warp(0, place);
  barrier.acquire();
}

uint64_t BlockRunner::warp_sum(uint64_t value, int lanes, Place place) {
  const uint64_t* const values = warps_[warp_of(current_)].values[meet_warp(value, place)];
  return std::accumulate(values, values + lanes, uint64_t{0});
}

// Waits for the other lanes, and says in which set of values theirs are.
int BlockRunner::meet_warp(uint64_t value, Place place) {
  const uint32_t w = warp_of(current_);
  const uint32_t first = w * static_cast<uint32_t>(grid_.warp_size);
  Warp& warp = warps_[w];
  if (schedule_.strict && warp.live < warp.size)
    fail("warp operation at " + to_text(place) + " after lanes of the warp have left the kernel");
  for (uint32_t t = first; t < first + static_cast<uint32_t>(warp.size); ++t) {
    const Fiber& other = fibers_[t];
    if (other.wait == Wait::kNone) continue;
    if (other.wait == Wait::kBlock || other.place.line != place.line ||
        std::strcmp(other.place.file, place.file) != 0)
      fail("warp operation in divergent code: thread " + std::to_string(current_) + " is at " +
           to_text(place) + ", thread " + std::to_string(t) + " of the same warp waits at " +
           to_text(other.place));
  }
  const int parity = warp.parity;
  if (warp.arrived == 0) std::fill_n(warp.values[parity], kMaxWarpSize, 0);
  warp.values[parity][current_ - first] = value;
  fibers_[current_].place = place;
  fibers_[current_].wait = Wait::kWarp;
  ++warp.arrived;
  if (warp.arrived == warp.live) release_warp(w);
  resume_next();
  return parity;
}

void BlockRunner::release_block() {
  at_barrier_ = 0;
  block_parity_ ^= 1;
  for (uint32_t t = 0; t < grid_.threads; ++t)
    if (fibers_[t].wait == Wait::kBlock) make_ready(t);
}

void BlockRunner::release_warp(uint32_t w) {
  Warp& warp = warps_[w];
  warp.arrived = 0;
  warp.parity ^= 1;
  const uint32_t first = w * static_cast<uint32_t>(grid_.warp_size);
  for (uint32_t t = first; t < first + static_cast<uint32_t>(warp.size); ++t)
    if (fibers_[t].wait == Wait::kWarp) make_ready(t);
}

uint32_t BlockRunner::take_ready() {
  uint32_t& first = ready_[ready_head_];
  if (schedule_.seed) std::swap(first, ready_[(ready_head_ + random_() % ready_count_) % grid_.threads]);
  const uint32_t next = first;
  ready_head_ = (ready_head_ + 1) % grid_.threads;
  --ready_count_;
  return next;
}

void BlockRunner::resume_next() {
  if (ready_count_ == 0) {
    if (live_ > 0) {
      std::string message = "deadlock: no thread can go on";
      for (uint32_t t = 0; t < grid_.threads; ++t) {
        if (fibers_[t].wait == Wait::kNone) continue;
        message += ", thread " + std::to_string(t) + " waits at " + to_text(fibers_[t].place);
        break;
      }
      fail(message);
    }
    return_to_scheduler();
  }
  const uint32_t next = take_ready();
  if (next == current_) return;
  Fiber& from = fibers_[current_];
  current_ = next;
  from.sanitizer.before_switch(fibers_[next].sanitizer);
  hisparse_switch_stack(&from.stack_pointer, fibers_[next].stack_pointer);
  from.sanitizer.after_switch();
}

// The other fibers of the block are abandoned where they stand: kernels own nothing that would need
// unwinding.
void BlockRunner::fail(const std::string& message) {
  error_ = "block " + std::to_string(block_) + ": " + message;
  return_to_scheduler();
}

void BlockRunner::return_to_scheduler() {
  fibers_[current_].sanitizer.before_last_switch(scheduler_sanitizer_);
  void* abandoned;
  hisparse_switch_stack(&abandoned, scheduler_stack_pointer_);
  __builtin_unreachable();
}

}  // namespace

void run_grid(Kernel kernel, const void* params, const Grid& grid, const Schedule& schedule) {
  thread_local BlockRunner runner;
  runner.run(kernel, params, grid, schedule);
}

uint32_t thread_index() { return running->thread(); }
uint32_t block_index() { return running->block() % running->grid().blocks; }
uint32_t block_part() { return running->block() / running->grid().blocks; }
uint32_t block_size() { return running->grid().threads; }
uint32_t grid_size() { return running->grid().blocks; }
unsigned char* shared_memory() { return running->shared(); }
void block_barrier(Place place) { running->block_barrier(place); }
uint64_t warp_sum(uint64_t value, int lanes, Place place) { return running->warp_sum(value, lanes, place); }
void warp_barrier(Place place) { running->warp_barrier(place); }

}  // namespace hisparse::cpu
