// The extension module hisparse._C: positional arguments in, errors out. Names, defaults and documentation
// are in hisparse/*.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>

#include "arguments.h"
#include "build_config.h"
#include "checks.h"
#include "content_check.h"
#include "cpu_runtime.h"
#include "device_runtimes.h"
#include "host_memory.h"
#include "kvcacheio_checks.h"
#include "released_gil.h"
#include "tensor.h"

namespace py = pybind11;

namespace hisparse::host {
namespace {

template <size_t>
using Argument = py::handle;  // what it holds is the checks' business

// Leaves the call to torch's dispatcher.
template <typename... Arguments>
py::object dispatch(const char* name, Arguments... arguments) {
  return py::module_::import("hisparse.torch_ops").attr("dispatch")(name, arguments...);
}

// hisparse.ContentError holds the place of the fault, which a message alone would not.
[[noreturn]] void raise(const ContentFault& fault) {
  const auto type = py::module_::import("hisparse.content_check").attr("ContentError");
  PyErr_SetObject(type.ptr(), type(fault.what(), fault.argument, fault.row, fault.column).ptr());
  throw py::error_already_set();
}

// The GIL is released even for a GPU: a launch can wait for a driver to load, or for room in a full queue.
template <auto check, size_t... index>
void add_op(py::module_& module, const char* name, std::index_sequence<index...>) {
  module.def(name, [name](Argument<index>... arguments) {
    const UnderWay under_way;
    PyObject* const all[] = {arguments.ptr()...};
    try {
      auto call = check(all);
      const ReleasedGil released;
      launch(call);
    } catch (const DispatchedTensor&) {
      dispatch(name, arguments...);
    } catch (const ContentFault& fault) {
      raise(fault);
    }
  });
}

template <typename Result, typename... Arguments>
void add_function(py::module_& module, const char* name, Result (*function)(Arguments...),
                  const char* documentation = nullptr) {
  const auto counted = [function](Arguments... arguments) {
    const UnderWay under_way;
    return function(arguments...);
  };
  module.def(name, counted, documentation);
}

py::object translate(py::handle mapping, py::handle locations, py::handle allocate) {
  try {
    py::object output;
    TranslateCall call = check_translation(mapping, locations, allocate, output);
    {
      const ReleasedGil released;
      launch(call);
    }
    return output;
  } catch (const DispatchedTensor&) {
    return dispatch("translate_padded_hisparse_locations", mapping, locations, allocate);
  }
}

template <size_t... op>
void add_transfer_ops(py::module_& module, std::index_sequence<op...>) {
  (add_op<check_transfer_op<op>>(module, kTransferOps[op].name,
                                 std::make_index_sequence<kTransferOps[op].arguments()>()),
   ...);
}

py::dict build_info() {
  py::list targets;
  targets.append("cpu");
  if (*HISPARSE_CUDA_ARCHS != '\0') targets.append("cuda");
  if (*HISPARSE_ROCM_ARCHS != '\0') targets.append("rocm");
  const auto archs = [](const char* joined) { return py::list(py::str(joined).attr("split")(";")); };
  py::dict info;
  info["version"] = HISPARSE_VERSION;
  info["targets"] = targets;
  info["cuda_archs"] = *HISPARSE_CUDA_ARCHS != '\0' ? archs(HISPARSE_CUDA_ARCHS) : py::list();
  info["rocm_archs"] = *HISPARSE_ROCM_ARCHS != '\0' ? archs(HISPARSE_ROCM_ARCHS) : py::list();
#if defined(__clang__)
  info["compiler"] = __VERSION__;
#else
  info["compiler"] = "GCC " __VERSION__;
#endif
  return info;
}

// What this machine has of each target: its devices, or the reason why there are none.
py::list targets() {
  py::list all;
  for (Runtime* runtime : {&cpu_runtime(), &cuda_runtime(), &hip_runtime()}) {
    std::vector<DeviceInfo> infos;
    std::optional<DriverInfo> driver;
    std::optional<std::string> unavailable;
    try {
      const ReleasedGil released;
      driver = runtime->driver();
      for (int index = 0; index < runtime->device_count(); ++index) infos.push_back(runtime->device(index));
    } catch (const std::runtime_error& error) {
      unavailable = error.what();
    }
    py::list devices;
    for (const DeviceInfo& info : infos) {
      py::dict device;
      device["index"] = devices.size();
      device["name"] = info.name;
      device["arch"] = info.arch;
      device["warp_size"] = info.warp_size;
      device["max_threads_per_block"] = info.max_threads_per_block;
      device["multiprocessors"] = info.multiprocessors;
      device["shared_memory_bytes"] = info.shared_memory_bytes;
      devices.append(device);
    }
    py::dict target;
    target["target"] = runtime->target();
    target["devices"] = devices;
    target["library"] = driver ? py::cast(driver->library) : py::none();
    target["driver_version"] = driver ? py::cast(driver->version) : py::none();
    target["unavailable"] = unavailable;
    all.append(target);
  }
  return all;
}

py::tuple get_cpu_options() {
  const CpuOptions options = cpu_options();
  return py::make_tuple(options.warp_size, options.seed, options.strict, options.item_copy,
                        options.shared_memory_bytes);
}

// The values of an Options tuple, or None for those of the environment.
void change_cpu_options(py::object values) {
  if (values.is_none()) return set_cpu_options(std::nullopt);
  const auto [warp_size, seed, strict, item_copy, shared_memory_bytes] =
      values.cast<std::tuple<py::object, py::object, py::object, py::object, py::object>>();
  CpuOptions options;
  options.warp_size = static_cast<int>(read_integer("warp_size", warp_size, 1, 1024));
  if (!seed.is_none()) options.seed = static_cast<uint64_t>(read_integer("seed", seed, 0, INT64_MAX));
  options.strict = read_flag("strict", strict);
  if (!py::isinstance<py::str>(item_copy)) type_error("item_copy", "a str", type_name(item_copy));
  options.item_copy = item_copy.cast<std::string>();
  options.shared_memory_bytes =
      static_cast<size_t>(read_integer("shared_memory_bytes", shared_memory_bytes, 0, INT64_MAX));
  set_cpu_options(options);
}

}  // namespace
}  // namespace hisparse::host

static constexpr const char* kOtherInterpreter =
    "hisparse runs in the main interpreter alone: use processes instead";
static bool in_main_interpreter() { return PyInterpreterState_Get() == PyInterpreterState_Main(); }

// Asked twice: before Python 3.12, pybind11 deadlocks in a sub-interpreter as soon as it looks for its own
// state, so its PyInit__C comes second; from 3.13 on, the main interpreter calls PyInit__C for all of them.
#define PyInit__C initialize_in_main_interpreter
PYBIND11_MODULE(_C, module) {
  using namespace hisparse::host;
  if (!in_main_interpreter()) throw py::import_error(kOtherInterpreter);
  wait_at_the_end();
  add_op<check_swap_in>(module, "load_cache_to_device_buffer_mla",
                        std::make_index_sequence<kSwapInArguments>());
  add_op<check_dsv4_swap_in>(module, "load_cache_to_device_buffer_dsv4_mla",
                             std::make_index_sequence<kSwapInArguments>());
  add_op<check_block_swap_in>(module, "load_blocks_to_device_buffer_mha",
                              std::make_index_sequence<kBlockSwapInArguments>());
  add_op<check_planned_copy>(module, "copy_cache_planned_mla",
                             std::make_index_sequence<kPlannedCopyArguments>());
  add_op<check_layer_tokens>(module, "transfer_cache_dsv4_mla",
                             std::make_index_sequence<kLayerTokensArguments>());
  add_function(module, "translate_padded_hisparse_locations", &translate);
  add_op<check_copy_items>(module, "copy_items", std::make_index_sequence<kCopyItemsArguments>());
  add_transfer_ops(module, std::make_index_sequence<std::size(kTransferOps)>());
  add_op<check_direct>(module, "transfer_kv_direct", std::make_index_sequence<kDirectArguments>());
  add_op<check_direct_from_pages>(module, "transfer_kv_per_layer_direct_pf_lf",
                                  std::make_index_sequence<kDirectFromPagesArguments>());
  add_op<check_direct_to_pages>(module, "transfer_kv_all_layer_direct_lf_pf",
                                std::make_index_sequence<kDirectToPagesArguments>());
  add_op<check_embedding_ranges>(module, "transfer_embedding_ranges_direct",
                                 std::make_index_sequence<kEmbeddingRangesArguments>());
  add_op<check_layer_copy>(module, "copy_all_layer_kv_cache_cpu",
                           std::make_index_sequence<kLayerCopyArguments>());
  add_function(
      module, "get_device_accessible_ptr", +[](py::handle tensor, py::handle device_index) {
        return get_device_accessible_ptr(tensor.ptr(), device_index.ptr());
      });
  add_function(module, "host_memory", &host_memory);
  add_function(module, "gpu_target", &gpu_target);
  add_function(module, "register_host_memory", &register_host_memory);
  add_function(module, "unregister_host_memory", &unregister_host_memory);
  add_function(
      module, "build_info", &build_info,
      "What this build of hisparse contains: its version, targets, archs per GPU target, and the host "
      "compiler.");
  add_function(module, "targets", &targets,
               "Each target with the devices that this machine has for it, or why there are none.");
  add_function(module, "add_content_checks", +[](int count) { content_checks += count; });
  add_function(module, "cpu_options", &get_cpu_options);
  add_function(module, "set_cpu_options", &change_cpu_options);
  add_function(module, "leave_out", +[](int part) { leave_out(static_cast<CopyPart>(part)); });
}

#undef PyInit__C
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  if (in_main_interpreter()) return initialize_in_main_interpreter();
  PyErr_SetString(PyExc_ImportError, kOtherInterpreter);
  return nullptr;
}
