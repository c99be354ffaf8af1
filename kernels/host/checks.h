// The arguments of the ops, checked as their contract says and turned into kernel parameters.
#pragma once

#include <pybind11/pybind11.h>

#include "launcher.h"

namespace hisparse::host {

inline constexpr int kSwapInArguments = 21;
inline constexpr int kBlockSwapInArguments = 20;
inline constexpr int kPlannedCopyArguments = 11;
inline constexpr int kLayerTokensArguments = 5;
inline constexpr int kCopyItemsArguments = 6;

// `arguments` in the order of the Python functions, all of them. Raises ValueError or TypeError naming the
// argument.
SwapInCall check_swap_in(PyObject* const* arguments);
SwapInCall check_dsv4_swap_in(PyObject* const* arguments);
SwapInCall check_block_swap_in(PyObject* const* arguments);
PlannedCopyCall check_planned_copy(PyObject* const* arguments);
LayerTokensCall check_layer_tokens(PyObject* const* arguments);
CopyItemsCall check_copy_items(PyObject* const* arguments);

// `output` is what allocate(locations, dtype) returns, called once the two arguments have passed the checks.
TranslateCall check_translation(pybind11::handle mapping, pybind11::handle locations,
                                pybind11::handle allocate, pybind11::object& output);

}  // namespace hisparse::host
