// The one form that every complaint about an argument has.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace hisparse::host {

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// A ValueError in Python. Its sibling type_error is in arguments.h: this header is for code that knows no
// Python.
[[noreturn]] inline void value_error(const char* argument, const std::string& expected,
                                     const std::string& got) {
  throw std::invalid_argument(text(argument, ": expected ", expected, ", got ", got));
}

}  // namespace hisparse::host
