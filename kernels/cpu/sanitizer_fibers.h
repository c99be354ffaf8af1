// Tells AddressSanitizer which stack runs. Without it, nothing.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace hisparse::cpu {

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
