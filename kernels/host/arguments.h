// Plain Python arguments of the ops.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "errors.h"

namespace hisparse::host {

[[noreturn]] void type_error(const char* argument, const std::string& expected, const std::string& got);

std::string type_name(pybind11::handle object);

// An int within [least, most]. A bool is no int here, and neither is a tensor of one element.
int64_t read_integer(const char* argument, pybind11::handle object, int64_t least, int64_t most);
// A layer of a pool. What does not fit is far outside of every pool, and no different from any other outside.
int64_t read_layer(const char* argument, pybind11::handle object);
bool read_flag(const char* argument, pybind11::handle object);

}  // namespace hisparse::host
