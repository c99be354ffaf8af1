#include "tensor.h"

#include <algorithm>
#include <unordered_map>

#include "arguments.h"

namespace py = pybind11;

namespace hisparse::host {
namespace {

// How the tensors of a Python type are read.
struct TypeReader {
  const dlpack::ExchangeApi* api = nullptr;
  bool is_torch = false;
  bool is_numpy = false;
  bool dispatches = false;
};

const dlpack::ExchangeApi* find_exchange_api(PyTypeObject* type) {
  const auto capsule =
      py::getattr(reinterpret_cast<PyObject*>(type), dlpack::kExchangeApiAttribute, py::none());
  if (!PyCapsule_IsValid(capsule.ptr(), dlpack::kExchangeApiCapsule)) return nullptr;
  auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), dlpack::kExchangeApiCapsule));
  while (api != nullptr && api->major_version != dlpack::kMajorVersion) api = api->previous;
  return api != nullptr && api->tensor_from_object != nullptr ? api : nullptr;
}

// Whether `type` derives from `module.name`. A type whose module was never imported has no instances.
bool derives_from(PyTypeObject* type, const char* module, const char* name) {
  PyObject* loaded = PyDict_GetItemString(PyImport_GetModuleDict(), module);
  if (loaded == nullptr) return false;
  const auto base = py::getattr(loaded, name, py::none());
  return PyType_Check(base.ptr()) && PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(base.ptr()));
}

// Whether a subclass of torch.Tensor has a __torch_dispatch__ of its own.
bool dispatches(PyTypeObject* type) {
  const char* name = "__torch_dispatch__";
  const auto own = py::getattr(reinterpret_cast<PyObject*>(type), name, py::none());
  return !own.is(py::getattr(py::module_::import("torch").attr("Tensor"), name, py::none()));
}

TypeReader reader_of(PyTypeObject* type) {
  static auto* readers = new std::unordered_map<PyTypeObject*, TypeReader>();
  const auto known = readers->find(type);
  if (known != readers->end()) return known->second;
  TypeReader reader{find_exchange_api(type), derives_from(type, "torch", "Tensor"),
                    derives_from(type, "numpy", "ndarray")};
  reader.dispatches = reader.is_torch && dispatches(type);
  if (reader.api != nullptr || reader.is_torch || reader.is_numpy) {
    Py_INCREF(type);  // so that the address stays this type's
    readers->emplace(type, reader);
  }
  return reader;
}

std::vector<int64_t> row_major_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    if (shape[i] > 1 && __builtin_mul_overflow(step, shape[i], &step)) step = INT64_MAX;
  }
  return strides;
}

std::vector<int64_t> integers(py::handle sequence) {
  std::vector<int64_t> values;
  for (py::handle item : sequence) values.push_back(item.cast<int64_t>());
  return values;
}

std::string tuple_text(const int64_t* values, int count) {
  std::string joined;
  for (int i = 0; i < count; ++i) joined += (i > 0 ? ", " : "") + std::to_string(values[i]);
  return "(" + joined + (count == 1 ? ",)" : ")");
}

}  // namespace

bool torch_is_for_rocm() {
  PyObject* torch = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");
  if (torch == nullptr) return false;
  const auto version = py::getattr(torch, "version", py::none());
  return !py::getattr(version, "hip", py::none()).is_none();
}

TensorView::TensorView(const char* argument, py::handle object) : argument_(argument), object_(object.ptr()) {
  const TypeReader reader = reader_of(Py_TYPE(object_));
  if (reader.dispatches) {
    throw DispatchedTensor(text(argument, ": expected a tensor with memory, got ", type_name(object)));
  }
  api_ = reader.api;
  std::string why;
  try {
    if (api_ != nullptr && read_exchange_api()) {
      if (reader.is_torch) refuse_lazy_bits();
      return;
    }
    if (api_ != nullptr && !reader.is_torch) throw py::error_already_set();
    PyErr_Clear();  // a dtype that DLPack has no name for, say: the attributes may still tell
    if (reader.is_torch) {
      read_torch_attributes();
      refuse_lazy_bits();
      return;
    }
    if (reader.is_numpy) {
      read_numpy_array();
      return;
    }
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    why = text(" (", error.what(), ")");
    why = why.substr(0, why.find('\n'));
  } catch (const py::cast_error&) {
    why = " (an attribute that is no number or text, or one that is too large)";
  }
  type_error(argument, "a dense torch.Tensor or numpy.ndarray", type_name(object) + why);
}

TensorView TensorView::optional(const char* argument, py::handle object) {
  return object.is_none() ? TensorView() : TensorView(argument, object);
}

// False, with a Python error set, where the framework can't express the tensor.
bool TensorView::read_exchange_api() {
  dlpack::Tensor tensor{};
  if (api_->tensor_from_object(object_, &tensor) != 0) return false;
  data_ = static_cast<char*>(tensor.data) + tensor.byte_offset;
  ndim_ = tensor.ndim;
  shape_ = tensor.shape;
  strides_ = tensor.strides;
  if (strides_ == nullptr && ndim_ > 0) {
    std::vector<int64_t> shape(shape_, shape_ + ndim_);
    own_layout(shape, row_major_strides(shape));
  }
  type_code_ = tensor.dtype.lanes == 1 ? tensor.dtype.code : static_cast<uint8_t>(dlpack::kOpaque);
  element_bits_ = int64_t{tensor.dtype.bits} * tensor.dtype.lanes;
  set_device(tensor.device.type, tensor.device.index);
  return true;
}

void TensorView::read_torch_attributes() {
  const py::handle tensor(object_);
  data_ = reinterpret_cast<void*>(tensor.attr("data_ptr")().cast<uintptr_t>());
  element_bits_ = int64_t{8} * tensor.attr("element_size")().cast<int32_t>();
  own_layout(integers(tensor.attr("shape")), integers(tensor.attr("stride")()));
  const std::string dtype = dtype_text();
  if (dtype.rfind("torch.int", 0) == 0) type_code_ = dlpack::kInt;
  if (dtype.rfind("torch.uint", 0) == 0) type_code_ = dlpack::kUnsigned;
  if (dtype.rfind("torch.float", 0) == 0) type_code_ = dlpack::kFloat;
  if (dtype.rfind("torch.complex", 0) == 0) type_code_ = dlpack::kComplex;
  const auto device = tensor.attr("device");
  const auto type = device.attr("type").cast<std::string>();
  if (type == "cpu") return;
  if (type != "cuda") type_error(argument_, "a tensor on a CPU, CUDA or ROCm device", type);
  const bool rocm = !py::module_::import("torch").attr("version").attr("hip").is_none();
  set_device(rocm ? dlpack::kRocm : dlpack::kCuda, device.attr("index").cast<int>());
}

// The array interface rather than the buffer protocol, which has no formats for bfloat16 or float8.
void TensorView::read_numpy_array() {
  const py::dict interface = py::handle(object_).attr("__array_interface__");
  if (py::handle(object_).attr("dtype").attr("hasobject").cast<bool>()) {
    type_error(
        argument_, "an array of plain bytes",
        "one of objects (dtype " + py::str(py::handle(object_).attr("dtype")).cast<std::string>() + ")");
  }
  const py::tuple data = interface["data"];
  const auto typestr = interface["typestr"].cast<std::string>();
  const auto element_bytes = py::handle(object_).attr("itemsize").cast<int32_t>();
  data_ = reinterpret_cast<void*>(data[0].cast<uintptr_t>());
  read_only_ = data[1].cast<bool>();
  element_bits_ = int64_t{8} * element_bytes;
  if (typestr.size() < 2) type_error(argument_, "an array with a dtype", "one without");
  if (typestr[0] != '>' && typestr[1] == 'i') type_code_ = dlpack::kInt;
  if (typestr[0] != '>' && typestr[1] == 'u') type_code_ = dlpack::kUnsigned;

  std::vector<int64_t> shape = integers(interface["shape"]);
  std::vector<int64_t> strides = row_major_strides(shape);
  const py::object byte_strides = interface["strides"];
  if (!byte_strides.is_none()) {
    const std::vector<int64_t> bytes = integers(byte_strides);
    strides.resize(bytes.size());
    if (bytes.size() != shape.size()) own_layout(std::move(shape), strides);  // refuses it
    for (size_t i = 0; i < shape.size(); ++i) {
      if (shape[i] <= 1) continue;  // NumPy may put any stride there
      if (element_bytes != 0 && bytes[i] % element_bytes == 0) {
        strides[i] = bytes[i] / element_bytes;
      } else {
        value_error(argument_, "strides of whole elements",
                    tuple_text(bytes.data(), static_cast<int>(bytes.size())) + " bytes");
      }
    }
  }
  own_layout(std::move(shape), strides);
}

// torch conjugates and negates lazily: the memory of such a tensor does not hold its values.
void TensorView::refuse_lazy_bits() const {
  const char* bit = type_code_ == dlpack::kComplex ? "is_conj"
                    : type_code_ == dlpack::kFloat ? "is_neg"
                                                   : nullptr;
  if (bit != nullptr && py::handle(object_).attr(bit)().cast<bool>()) {
    value_error(argument_, "a tensor that is resolved in memory (resolve_conj(), resolve_neg())",
                text("one with ", bit, "() true"));
  }
}

void TensorView::set_device(int32_t dlpack_type, int index) {
  dlpack_device_type_ = dlpack_type;
  switch (dlpack_type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
    case dlpack::kRocmHost:
      device_ = {DeviceKind::kCpu, 0};
      return;
    case dlpack::kCuda:
    case dlpack::kCudaManaged:
      device_ = {DeviceKind::kCuda, index};
      return;
    case dlpack::kRocm:
      device_ = {DeviceKind::kRocm, index};
      return;
    default:
      type_error(argument_, "a tensor on a CPU, CUDA or ROCm device",
                 text("DLPack device type ", dlpack_type));
  }
}

// What a subclass says of itself need not be so.
void TensorView::own_layout(std::vector<int64_t> shape, const std::vector<int64_t>& strides) {
  const bool has_negative = std::any_of(shape.begin(), shape.end(), [](int64_t size) { return size < 0; });
  if (has_negative || element_bits_ < 0 || shape.size() != strides.size()) {
    type_error(argument_, "as many strides as sizes, and no negative size",
               text("shape ", tuple_text(shape.data(), static_cast<int>(shape.size())), " with ",
                    strides.size(), " strides"));
  }
  ndim_ = static_cast<int32_t>(shape.size());
  owned_layout_ = std::move(shape);
  owned_layout_.insert(owned_layout_.end(), strides.begin(), strides.end());
  shape_ = owned_layout_.data();
  strides_ = shape_ + ndim_;
}

int64_t TensorView::bytes() const {
  int64_t bits = element_bits_;
  bool overflow = false;
  for (int i = 0; i < ndim_; ++i) {
    if (shape_[i] == 0) return 0;
    overflow |= __builtin_mul_overflow(bits, shape_[i], &bits);
  }
  if (overflow) value_error(argument_, "a size that fits in memory", "shape " + shape_text());
  return bits / 8;
}

bool TensorView::is_row_major() const {
  if (bytes() == 0) return true;
  int64_t step = 1;  // can't overflow where bytes() did not
  for (int i = ndim_ - 1; i >= 0; --i) {
    if (shape_[i] > 1 && strides_[i] != step) return false;
    step *= shape_[i];
  }
  return true;
}

// DLPack has no names for some dtypes, and the text of one takes Python code to make.
bool TensorView::has_dtype_of(const TensorView& other) const {
  const auto dtype = [](PyObject* object) { return py::getattr(py::handle(object), "dtype", py::none()); };
  return type_code_ == other.type_code_ && element_bits_ == other.element_bits_ &&
         dtype(object_).equal(dtype(other.object_));
}

std::string TensorView::dtype_text() const {
  return py::str(py::getattr(py::handle(object_), "dtype", py::str("an unnamed dtype")));
}

std::string TensorView::shape_text() const { return tuple_text(shape_, ndim_); }

std::string TensorView::strides_text() const { return tuple_text(strides_, ndim_); }

void* TensorView::current_stream() const {
  if (device_.kind == DeviceKind::kCpu) return nullptr;
  if (api_ != nullptr) {
    void* stream = nullptr;
    if (api_->current_stream(dlpack_device_type_, device_.index, &stream) != 0) throw py::error_already_set();
    return stream;
  }
  const auto cuda = py::module_::import("torch").attr("cuda");
  return reinterpret_cast<void*>(
      cuda.attr("current_stream")(device_.index).attr("cuda_stream").cast<uintptr_t>());
}

}  // namespace hisparse::host
