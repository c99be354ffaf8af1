// Host memory that kernels reach: one driver call each. What is registered when is up to
// hisparse/host_memory.py.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace hisparse::host {

// Address and bytes of contiguous host memory. ValueError or TypeError for anything else.
std::pair<uintptr_t, int64_t> host_memory(pybind11::handle memory);

// "cuda" or "rocm": whose GPUs this machine has. None: the functions below are not to be called.
std::optional<std::string> gpu_target();

// ValueError where the machine has no such device, or the driver knows the memory already; RuntimeError where
// the driver refuses it.
void register_host_memory(const std::string& target, uintptr_t address, size_t bytes, int64_t device_index);
void unregister_host_memory(const std::string& target, uintptr_t address, int64_t device_index);

}  // namespace hisparse::host
