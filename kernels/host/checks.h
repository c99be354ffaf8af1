// The arguments of the ops, checked as their contract says and turned into kernel parameters.
#pragma once

#include <Python.h>

#include "launcher.h"

namespace hisparse::host {

inline constexpr int kSwapInArguments = 21;
inline constexpr int kCopyItemsArguments = 6;

// `arguments` in the order of the Python functions, all of them. Raises ValueError or TypeError naming the
// argument.
SwapInCall check_swap_in(PyObject* const* arguments);
CopyItemsCall check_copy_items(PyObject* const* arguments);

}  // namespace hisparse::host
