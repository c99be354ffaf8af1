// The GIL, released around work that needs no Python, and the end of the interpreter.
#pragma once

#include <pybind11/pybind11.h>

namespace hisparse::host {

// A call of this module, from its first line to its last. Every one may let go of the GIL: it releases it, or
// calls Python code or another library that does, or makes an object that sets off a garbage collection. A
// thread that asks for the GIL back once the interpreter is being torn down is stopped in its destructors by
// the interpreter, and takes the process with it: std::terminate. So the end waits for the calls that are
// under way, and a thread beside the one that ends does not come back from the constructor any more: it is
// stopped here, where it has nothing to destroy. Calls inside a call go on. Made and destroyed under the GIL.
class UnderWay {
 public:
  UnderWay();
  ~UnderWay();
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;
};

// Releases the GIL while it lives, inside an UnderWay.
class ReleasedGil {
 public:
  ReleasedGil() = default;
  ~ReleasedGil();
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  const pybind11::gil_scoped_release released_;
};

// Has the interpreter wait at its end.
void wait_at_the_end();

}  // namespace hisparse::host
