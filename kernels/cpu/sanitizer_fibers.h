// Tells AddressSanitizer which stack runs, and ThreadSanitizer which thread, and what orders its accesses.
// Without them, nothing.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(HISPARSE_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#endif

namespace hisparse::cpu {

#if defined(HISPARSE_THREAD_SANITIZER)

// Whoever releases a point comes before all who acquire it later.
class SyncPoint {
 public:
  void release() { __tsan_release(&address_); }
  void acquire() { __tsan_acquire(&address_); }

 private:
  char address_ = 0;
};

// Blocks run one after another here, but at once on a GPU: memory that they have in common would look like a
// race.
inline constexpr bool kBlocksShareMemory = false;

#else

struct SyncPoint {
  void release() {}
  void acquire() {}
};

inline constexpr bool kBlocksShareMemory = true;

#endif

#if defined(__SANITIZE_ADDRESS__)

inline constexpr size_t kFiberStackBytes = 256 * 1024;

class SanitizerFiber {
 public:
  void create(const unsigned char* stack, size_t bytes) {
    stack_ = stack;
    bytes_ = bytes;
    fake_stack_ = nullptr;
  }
  void destroy() { __asan_unpoison_memory_region(stack_, bytes_); }
  void before_switch(SanitizerFiber& next) {
    left_ = this;
    __sanitizer_start_switch_fiber(&fake_stack_, next.stack_, next.bytes_);
  }
  void before_last_switch(SanitizerFiber& next) {
    left_ = nullptr;
    __sanitizer_start_switch_fiber(nullptr, next.stack_, next.bytes_);
  }
  void after_switch() {
    const void* stack;
    size_t bytes;
    __sanitizer_finish_switch_fiber(fake_stack_, &stack, &bytes);
    // Nobody created the scheduler's own stack: the first switch away from it tells where it is.
    if (left_ != nullptr && left_->stack_ == nullptr)
      left_->create(static_cast<const unsigned char*>(stack), bytes);
  }

 private:
  static inline thread_local SanitizerFiber* left_ = nullptr;
  const unsigned char* stack_ = nullptr;
  size_t bytes_ = 0;
  void* fake_stack_ = nullptr;
};

// Poisons what surrounds the shared memory inside its storage while a grid runs.
class SharedMemoryGuard {
 public:
  SharedMemoryGuard(unsigned char* storage, size_t storage_bytes, unsigned char* shared, size_t shared_bytes)
      : storage_(storage), bytes_(storage_bytes) {
    __asan_poison_memory_region(storage, storage_bytes);
    __asan_unpoison_memory_region(shared, shared_bytes);
  }
  ~SharedMemoryGuard() { __asan_unpoison_memory_region(storage_, bytes_); }
  SharedMemoryGuard(const SharedMemoryGuard&) = delete;
  SharedMemoryGuard& operator=(const SharedMemoryGuard&) = delete;

 private:
  unsigned char* storage_;
  size_t bytes_;
};

#elif defined(HISPARSE_THREAD_SANITIZER)

inline constexpr size_t kFiberStackBytes = 512 * 1024;  // it writes its reports on the stack of the thread

// Each thread of a block is one to ThreadSanitizer too. A switch orders nothing: only sync points do.
class SanitizerFiber {
 public:
  void create(const unsigned char*, size_t) { fiber_ = __tsan_create_fiber(0); }
  void destroy() { __tsan_destroy_fiber(fiber_); }
  void before_switch(SanitizerFiber& next) {
    // Nobody created the scheduler.
    if (fiber_ == nullptr) fiber_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(next.fiber_, __tsan_switch_to_fiber_no_sync);
  }
  void before_last_switch(SanitizerFiber& next) { before_switch(next); }
  void after_switch() {}

 private:
  void* fiber_ = nullptr;
};

struct SharedMemoryGuard {
  SharedMemoryGuard(unsigned char*, size_t, unsigned char*, size_t) {}
};

#else

inline constexpr size_t kFiberStackBytes = 32 * 1024;

struct SanitizerFiber {
  void create(const unsigned char*, size_t) {}
  void destroy() {}
  void before_switch(SanitizerFiber&) {}
  void before_last_switch(SanitizerFiber&) {}
  void after_switch() {}
};

struct SharedMemoryGuard {
  SharedMemoryGuard(unsigned char*, size_t, unsigned char*, size_t) {}
};

#endif

}  // namespace hisparse::cpu
