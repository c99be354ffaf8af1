#include "released_gil.h"

#include <pthread.h>

#include <chrono>
#include <thread>

namespace py = pybind11;

namespace hisparse::host {
namespace {

// Both under the GIL.
int calls = 0;  // that have released it
bool ends = false;

constexpr auto kLongest = std::chrono::seconds(30);  // a device that hangs must not keep the process for ever

void wait_for_calls() {
  ends = true;
  const auto deadline = std::chrono::steady_clock::now() + kLongest;
  while (calls > 0 && std::chrono::steady_clock::now() < deadline) {
    const py::gil_scoped_release release;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// The threads of other calls do not live in a child.
const int kForksWithoutCalls = pthread_atfork(nullptr, nullptr, [] { calls = 0; });

}  // namespace

ReleasedGil::ReleasedGil() {
  if (ends) return;
  ++calls;
  released_.emplace();
}

ReleasedGil::~ReleasedGil() {
  if (!released_) return;
  released_.reset();
  --calls;
}

void wait_at_exit() { py::module_::import("atexit").attr("register")(py::cpp_function(wait_for_calls)); }

}  // namespace hisparse::host
