// The GIL, released around work that needs no Python, and the end of the interpreter.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace hisparse::host {

// Releases the GIL while it lives. A thread that asks for the GIL back once the interpreter is being torn
// down is stopped in its destructors by the interpreter, and takes the process with it: std::terminate. So
// the end waits for calls that are under way, and later ones, of daemon threads, keep the GIL.
class ReleasedGil {
 public:
  ReleasedGil();
  ~ReleasedGil();
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

// Has the interpreter wait at its exit.
void wait_at_exit();

}  // namespace hisparse::host
