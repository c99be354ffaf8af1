#include "released_gil.h"

#include <pthread.h>

#include <chrono>
#include <thread>

namespace py = pybind11;

namespace hisparse::host {
namespace {

// All under the GIL.
int under_way = 0;
bool ends = false;
std::thread::id ending;  // the thread that it is never taken from

constexpr auto kLongest = std::chrono::seconds(30);  // a device that hangs must not keep the process for ever

void wait_for_all() {
  ends = true;
  ending = std::this_thread::get_id();
  const auto deadline = std::chrono::steady_clock::now() + kLongest;
  while (under_way > 0 && std::chrono::steady_clock::now() < deadline) {
    const py::gil_scoped_release release;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Other threads do not live in a child.
const int kForksWithoutWork = pthread_atfork(nullptr, nullptr, [] { under_way = 0; });

}  // namespace

UnderWay::UnderWay() : is_counted_(!ends || std::this_thread::get_id() == ending) {
  under_way += is_counted_;
}
UnderWay::~UnderWay() { under_way -= is_counted_; }

void wait_at_exit() { py::module_::import("atexit").attr("register")(py::cpp_function(wait_for_all)); }

}  // namespace hisparse::host
