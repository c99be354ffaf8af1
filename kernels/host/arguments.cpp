#include "arguments.h"

#include <algorithm>
#include <unordered_set>

namespace py = pybind11;

namespace hisparse::host {

void type_error(const char* argument, const std::string& expected, const std::string& got) {
  throw py::type_error(text(argument, ": expected ", expected, ", got ", got));
}

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

namespace {

// numbers.Integral answers in Python code, so it is asked once for each type.
bool is_integer_type(PyTypeObject* type) {
  static auto* known = new std::unordered_set<PyTypeObject*>();
  if (known->count(type) > 0) return true;
  const auto integral = py::module_::import("numbers").attr("Integral");
  const int answer = PyObject_IsSubclass(reinterpret_cast<PyObject*>(type), integral.ptr());
  if (answer < 0) throw py::error_already_set();
  if (answer == 0) return false;
  Py_INCREF(type);  // so that the address stays this type's
  known->insert(type);
  return true;
}

bool is_integer(py::handle object) {
  if (PyBool_Check(object.ptr())) return false;
  // numbers.Integral holds NumPy's integers, but no tensor that merely converts to an int.
  return PyLong_Check(object.ptr()) || is_integer_type(Py_TYPE(object.ptr()));
}

std::string range_text(int64_t least, int64_t most) {
  return most == INT64_MAX ? text("at least ", least) : text(least, " to ", most);
}

// `overflow` is -1 or 1 where the value does not fit.
int64_t read_any_integer(const char* argument, py::handle object, int& overflow) {
  if (!PyLong_CheckExact(object.ptr()) && !is_integer(object))
    type_error(argument, "an int", type_name(object));
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(object.ptr()));
  if (!index) throw py::error_already_set();
  return PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
}

}  // namespace

int64_t read_integer(const char* argument, py::handle object, int64_t least, int64_t most) {
  int overflow = 0;
  const int64_t value = read_any_integer(argument, object, overflow);
  if (overflow != 0 || value < least || value > most) {
    value_error(argument, range_text(least, most),
                overflow == 0  ? std::to_string(value)
                : overflow < 0 ? "less than -2**63"
                               : "2**63 or more");
  }
  return value;
}

int64_t read_layer(const char* argument, py::handle object) {
  constexpr int64_t kFarOutside = int64_t{1} << 62;
  int overflow = 0;
  const int64_t value = read_any_integer(argument, object, overflow);
  return overflow != 0 ? overflow * kFarOutside : std::clamp(value, -kFarOutside, kFarOutside);
}

bool read_flag(const char* argument, py::handle object) {
  if (object.ptr() == Py_True) return true;
  if (object.ptr() == Py_False) return false;
  if (!is_integer(object)) type_error(argument, "a bool", type_name(object));
  return read_integer(argument, object, 0, 1) != 0;
}

}  // namespace hisparse::host
