#include "released_gil.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace py = pybind11;

namespace hisparse::host {
namespace {

// All but the last under the GIL.
int under_way = 0;
thread_local int depth = 0;  // how many of them are this thread's, each inside the one before
bool ends = false;
std::thread::id ending;  // the thread that the GIL is never taken from
std::atomic<bool> waited{false};

constexpr auto kLongest = std::chrono::seconds(30);  // a device that hangs must not keep the process for ever

// A daemon thread that nobody waits for any more: what Python does itself with one that asks for the GIL,
// from 3.14 on.
[[noreturn]] void stop() {
  for (;;) pause();
}

void wait_for_all() {
  ends = true;
  ending = std::this_thread::get_id();
  const auto deadline = std::chrono::steady_clock::now() + kLongest;
  while (under_way > 0 && std::chrono::steady_clock::now() < deadline) {
    const py::gil_scoped_release release;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  waited = true;
}

// Other threads do not live in a child, and where the one that ends does not either, nor does the end.
void keep_only_this_thread() {
  under_way = depth;
  ends = ends && std::this_thread::get_id() == ending;
  waited = waited && ends;
}
const int kInForks = pthread_atfork(nullptr, nullptr, keep_only_this_thread);

}  // namespace

UnderWay::UnderWay() {
  if (ends && depth == 0 && std::this_thread::get_id() != ending) {
    PyEval_SaveThread();
    stop();
  }
  ++depth;
  ++under_way;
}

UnderWay::~UnderWay() {
  --depth;
  --under_way;
}

ReleasedGil::~ReleasedGil() {
  if (waited && std::this_thread::get_id() != ending)
    stop();  // for too long: the GIL is not to be had any more
}

// The interpreter drops its handlers once it has called them all, and is torn down then. The wait comes with
// that rather than with a call, since handlers that came before this one call ops too, and wait for threads
// that do. Python code that calls the handlers itself, or clears them, has a frame: it is not the end.
void wait_at_the_end() {
  const auto dropped = [](void*) {
    if (PyEval_GetFrame() == nullptr) wait_for_all();
  };
  const py::capsule handler(&under_way, dropped);
  py::module_::import("atexit").attr("register")(py::cpp_function([](py::handle) {}), handler);
}

}  // namespace hisparse::host
