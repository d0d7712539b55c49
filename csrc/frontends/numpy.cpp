#include "frontends/numpy.hpp"

#include <cstring>

namespace ktlib::frontends::numpy {
namespace {

PyTypeObject* ndarray = nullptr;
PyObject* empty_function = nullptr;
PyObject* matmul_function = nullptr;
PyObject* dtype_name = nullptr;  // interned "dtype"

void find_numpy() {
  PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "numpy");  // borrowed
  if (module == nullptr) return;
  PyObject* type = PyObject_GetAttrString(module, "ndarray");
  empty_function = PyObject_GetAttrString(module, "empty");
  matmul_function = PyObject_GetAttrString(module, "matmul");
  dtype_name = PyUnicode_InternFromString("dtype");
  if (type == nullptr || empty_function == nullptr || matmul_function == nullptr || dtype_name == nullptr) {
    PyErr_Clear();
    return;
  }
  ndarray = reinterpret_cast<PyTypeObject*>(type);
}

// Native byte order only: NumPy spells the other one with a prefix.
bool parse_format(const char* format, Dtype* dtype) {
  if (std::strcmp(format, "f") == 0) {
    *dtype = Dtype::fp32;
  } else if (std::strcmp(format, "e") == 0) {
    *dtype = Dtype::fp16;
  } else {
    return false;
  }
  return true;
}

Reason convert(const Py_buffer& view, Array* out) {
  if (view.ndim != 2) return Reason::not_matrices;
  if (!parse_format(view.format, &out->dtype)) return Reason::dtype;
  out->device_kind = DeviceKind::cpu;
  out->device = 0;
  out->address = reinterpret_cast<uint64_t>(view.buf);
  if (out->address % static_cast<uint64_t>(view.itemsize) != 0) return Reason::strides;
  for (int axis = 0; axis < 2; ++axis) {
    if (view.shape[axis] > 1 && view.strides[axis] % view.itemsize != 0) return Reason::strides;
    out->shape[axis] = view.shape[axis];
    out->strides[axis] = view.strides[axis] / view.itemsize;
  }
  return Reason::none;
}

}  // namespace

bool is_array_type(PyTypeObject* type) {
  if (ndarray == nullptr) find_numpy();
  return type == ndarray && type != nullptr;
}

Reason read(PyObject* array, bool writable, Array* out) {
  Py_buffer view;
  if (PyObject_GetBuffer(array, &view, PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)) != 0) {
    PyErr_Clear();
    return writable ? Reason::out : Reason::not_exportable;
  }
  const Reason reason = convert(view, out);
  PyBuffer_Release(&view);
  return reason;
}

PyObject* vendor_matmul() { return matmul_function; }

PyObject* empty(int64_t m, int64_t n, PyObject* like, Array* out) {
  PyObject* shape = Py_BuildValue("(LL)", static_cast<long long>(m), static_cast<long long>(n));
  PyObject* dtype = PyObject_GetAttr(like, dtype_name);
  PyObject* made = nullptr;
  if (shape != nullptr && dtype != nullptr) {
    PyObject* arguments[2] = {shape, dtype};
    made = PyObject_Vectorcall(empty_function, arguments, 2, nullptr);
  }
  Py_XDECREF(shape);
  Py_XDECREF(dtype);
  if (made != nullptr && read(made, true, out) != Reason::none) {
    Py_DECREF(made);
    PyErr_SetString(PyExc_RuntimeError, "numpy.empty answered with an array of another kind");
    return nullptr;
  }
  return made;
}

}  // namespace ktlib::frontends::numpy
