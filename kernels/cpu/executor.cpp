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

std::string to_text(Place place) { return std::string(place.file) + ":" + std::to_string(place.line); }

// One mapping for all stacks of a thread, a guard page below each.
class StackPool {
 public:
  ~StackPool() { release(); }

  unsigned char* stack(size_t index) { return base_ + index * pitch() + page_; }
  size_t stack_bytes() const { return kFiberStackBytes; }

  void reserve(size_t count) {
    if (count <= count_) return;
    release();
    void* memory = mmap(nullptr, count * pitch(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<unsigned char*>(memory);
    count_ = count;
    for (size_t i = 0; i < count; ++i) mprotect(base_ + i * pitch(), page_, PROT_NONE);
  }

 private:
  size_t pitch() const { return kFiberStackBytes + page_; }
  void release() {
    if (base_ != nullptr) munmap(base_, count_ * pitch());
    base_ = nullptr;
    count_ = 0;
  }

  size_t page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  unsigned char* base_ = nullptr;
  size_t count_ = 0;
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
  const uint64_t* warp_exchange(uint64_t value, Place place);

 private:
  static void fiber_entry();
  void run_block();
  void leave();
  [[noreturn]] void fail(const std::string& message);
  [[noreturn]] void return_to_scheduler();
  uint32_t take_ready();
  void resume_next();
  void release_block();
  void release_warp(uint32_t warp);
  void make_ready(uint32_t thread) {
    fibers_[thread].wait = Wait::kNone;
    ready_.push_back(thread);
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
  std::vector<uint32_t> ready_;
  size_t ready_head_ = 0;
  std::vector<unsigned char> shared_storage_;
  unsigned char* shared_ = nullptr;
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
  stacks_.reserve(grid.threads);
  fibers_.resize(grid.threads);
  warps_.resize((grid.threads + static_cast<uint32_t>(grid.warp_size) - 1) /
                static_cast<uint32_t>(grid.warp_size));
  // Sized to the byte, at a fixed alignment, so that AddressSanitizer sees a write past the end.
  shared_storage_.assign(grid.shared_bytes + 64, 0);
  shared_storage_.shrink_to_fit();
  auto address = reinterpret_cast<uintptr_t>(shared_storage_.data());
  shared_ = shared_storage_.data() + ((64 - address % 64) % 64);
  const SharedMemoryGuard guard(shared_storage_.data(), shared_storage_.size(), shared_, grid.shared_bytes);

  std::vector<uint32_t> order(grid.blocks * grid.parts);
  std::iota(order.begin(), order.end(), 0u);
  if (schedule.seed) std::shuffle(order.begin(), order.end(), random_);
  for (uint32_t block : order) {
    block_ = block;
    run_block();
    if (!error_.empty()) throw std::runtime_error(std::exchange(error_, {}));
  }
}

void BlockRunner::run_block() {
  if (grid_.shared_bytes > 0) std::memset(shared_, kSharedGarbage, grid_.shared_bytes);
  const auto warp_size = static_cast<uint32_t>(grid_.warp_size);
  for (uint32_t w = 0; w < warps_.size(); ++w) {
    const int lanes = static_cast<int>(std::min(warp_size, grid_.threads - w * warp_size));
    warps_[w] = Warp{{}, 0, 0, lanes, lanes};
  }
  ready_.clear();
  ready_head_ = 0;
  live_ = grid_.threads;
  at_barrier_ = 0;
  for (uint32_t t = 0; t < grid_.threads; ++t) {
    fibers_[t].stack_pointer =
        prepare_stack(stacks_.stack(t), stacks_.stack_bytes(), &BlockRunner::fiber_entry);
    fibers_[t].sanitizer.create(stacks_.stack(t), stacks_.stack_bytes());
    make_ready(t);
  }
  running = this;
  current_ = take_ready();
  scheduler_sanitizer_.before_switch(fibers_[current_].sanitizer);
  hisparse_switch_stack(&scheduler_stack_pointer_, fibers_[current_].stack_pointer);
  scheduler_sanitizer_.after_switch();
  running = nullptr;
  for (Fiber& fiber : fibers_) fiber.sanitizer.destroy();
}

void BlockRunner::fiber_entry() {
  BlockRunner* runner = running;
  runner->fibers_[runner->current_].sanitizer.after_switch();
  runner->kernel_(runner->params_);
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
  ++at_barrier_;
  if (at_barrier_ == live_) release_block();
  resume_next();
}

const uint64_t* BlockRunner::warp_exchange(uint64_t value, Place place) {
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
  if (warp.arrived == 0) std::memset(warp.values[parity], 0, sizeof(warp.values[parity]));
  warp.values[parity][current_ - first] = value;
  fibers_[current_].place = place;
  fibers_[current_].wait = Wait::kWarp;
  ++warp.arrived;
  if (warp.arrived == warp.live) release_warp(w);
  resume_next();
  return warp.values[parity];
}

void BlockRunner::release_block() {
  at_barrier_ = 0;
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
  if (schedule_.seed) {
    const size_t pick = ready_head_ + random_() % (ready_.size() - ready_head_);
    std::swap(ready_[ready_head_], ready_[pick]);
  }
  const uint32_t next = ready_[ready_head_++];
  if (ready_head_ == ready_.size()) {
    ready_.clear();
    ready_head_ = 0;
  }
  return next;
}

void BlockRunner::resume_next() {
  if (ready_head_ == ready_.size()) {
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
const uint64_t* warp_exchange(uint64_t value, Place place) { return running->warp_exchange(value, place); }

}  // namespace hisparse::cpu
