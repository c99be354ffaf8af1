// The GIL, released around work that needs no Python, and the end of the interpreter.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace hisparse::host {

// Work that can let go of the GIL: by releasing it, or by calling Python code or another library that does. A
// thread that asks for the GIL back once the interpreter is being torn down is stopped in its destructors by
// the interpreter, and takes the process with it: std::terminate. So the end waits for work that is under
// way; where this is false, it has begun, and in threads beside the one that ends nothing may let go of the
// GIL any more. Made and destroyed under the GIL.
class UnderWay {
 public:
  UnderWay();
  ~UnderWay();
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;

  explicit operator bool() const { return is_counted_; }

 private:
  const bool is_counted_;
};

// Releases the GIL while it lives, unless the interpreter ends.
class ReleasedGil {
 public:
  ReleasedGil() {
    if (under_way_) released_.emplace();
  }

 private:
  const UnderWay under_way_;  // outlives the release
  std::optional<pybind11::gil_scoped_release> released_;
};

// Has the interpreter wait at its exit.
void wait_at_exit();

}  // namespace hisparse::host
