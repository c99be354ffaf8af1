// The opt-in check of contents: what the checks of arguments cannot see, since it lies in device memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "../common/content_check.h"
#include "launcher.h"

namespace hisparse::host {

// How many ask for the check at the moment; zero costs one load per call.
inline std::atomic<int> content_checks{0};
inline bool checks_contents() { return content_checks.load(std::memory_order_relaxed) > 0; }

// A ContentError in Python.
class ContentFault : public std::invalid_argument {
 public:
  ContentFault(const char* argument, int64_t row, std::optional<int64_t> column, const std::string& what)
      : std::invalid_argument(what), argument(argument), row(row), column(column) {}

  const char* const argument;
  const int64_t row;
  const std::optional<int64_t> column;
};

// Where a check runs: as the call that it is for.
struct CheckPlace {
  Runtime& runtime;
  const DeviceInfo& info;
  Device device;
  void* stream;
};

// Throw ContentFault where a call's contents break what its contract takes on trust, and std::runtime_error
// where the stream is captured in a graph. They wait for the stream, and change nothing.
void check_contents(const SwapInParams& params, uint32_t threads, const CheckPlace& place);
void check_indices(const int64_t* src_indices, const int64_t* dst_indices, int64_t count, int64_t src_rows,
                   int64_t dst_rows, const CheckPlace& place);

}  // namespace hisparse::host
