// The counters with which the blocks of one request find out who is last. Every launch leaves its counters
// zero, so launches that run one after the other share them, and no others may.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace hisparse::host {

// Deals out zeroed device memory that is allocated once, so that no call allocates.
class ArrivalCounters {
 public:
  using StreamKey = std::pair<uint64_t, uint64_t>;
  static constexpr size_t kReserve = size_t{1} << 20;  // counters, 4 MiB

  void set_memory(uint32_t* memory, size_t count) {
    memory_ = memory;
    left_ = count;
  }

  // For launches that a graph captures: a graph may be replayed beside anything, so these are never used
  // again. Null once the reserve is used up.
  uint32_t* for_graph(int batch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return take(static_cast<size_t>(batch));
  }

  // For launches at once: one set per stream, since a stream runs its launches one after the other.
  uint32_t* for_stream(const StreamKey& stream, int batch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Block& block = streams_[stream];
    if (block.size < static_cast<size_t>(batch)) {
      size_t size = kLeast;
      while (size < static_cast<size_t>(batch)) size *= 2;
      uint32_t* const counters = take(size);
      if (counters == nullptr) return nullptr;
      block = {counters, size};
    }
    return block.counters;
  }

 private:
  struct Block {
    uint32_t* counters = nullptr;
    size_t size = 0;
  };
  static constexpr size_t kLeast = 64;
  static constexpr size_t kLine = 8;  // 32 bytes: what the memory system moves at least

  uint32_t* take(size_t count) {
    count = (count + kLine - 1) / kLine * kLine;
    if (count > left_) return nullptr;
    uint32_t* const counters = memory_;
    memory_ += count;
    left_ -= count;
    return counters;
  }

  std::mutex mutex_;
  uint32_t* memory_ = nullptr;
  size_t left_ = 0;
  std::map<StreamKey, Block> streams_;
};

}  // namespace hisparse::host
