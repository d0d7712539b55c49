#include "frontends/numpy.hpp"

#include <cstring>
#include <initializer_list>

namespace ktlib::frontends::numpy {
namespace {

PyTypeObject* ndarray = nullptr;
PyObject* empty_function = nullptr;
PyObject* matmul_function = nullptr;
PyObject* dtype_name = nullptr;  // interned "dtype"

// The head of an array in NumPy's binary interface, which extensions compile in: the same from 1.7 through 2.
// Exporting a buffer takes 70 ns and more, as it spells the format anew each time.
struct ArrayObject {
  PyObject_HEAD;
  char* data;
  int ndim;
  const Py_ssize_t* shape;
  const Py_ssize_t* strides;
  PyObject* base;
  PyObject* dtype;
  int flags;
};
constexpr unsigned kWriteable = 0x0400, kWarnOnWrite = 1u << 31;
// The objects that every plain array of the dtype shares; null: only buffers are read. Another object may
// mean the same; such arrays are read through a buffer.
PyObject* fp32_dtype = nullptr;
PyObject* fp16_dtype = nullptr;

void find_dtypes(PyObject* module);

// The ufunc from where NumPy defines it (2, then 1): numpy.matmul may have been replaced by ours.
PyObject* find_matmul(PyObject* numpy) {
  PyObject* modules = PyImport_GetModuleDict();
  for (const char* name : {"numpy._core._multiarray_umath", "numpy.core._multiarray_umath"}) {
    PyObject* home = PyDict_GetItemString(modules, name);  // borrowed
    PyObject* ufunc = home == nullptr ? nullptr : PyObject_GetAttrString(home, "matmul");
    if (ufunc != nullptr) return ufunc;
    PyErr_Clear();
  }
  return PyObject_GetAttrString(numpy, "matmul");
}

void find_numpy() {
  PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "numpy");  // borrowed
  if (module == nullptr) return;
  PyObject* type = PyObject_GetAttrString(module, "ndarray");
  empty_function = PyObject_GetAttrString(module, "empty");
  matmul_function = find_matmul(module);
  dtype_name = PyUnicode_InternFromString("dtype");
  if (type == nullptr || empty_function == nullptr || matmul_function == nullptr || dtype_name == nullptr) {
    PyErr_Clear();
    return;
  }
  ndarray = reinterpret_cast<PyTypeObject*>(type);
  find_dtypes(module);
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

Reason read_buffer(PyObject* array, bool writable, Array* out) {
  Py_buffer view;
  if (PyObject_GetBuffer(array, &view, PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)) != 0) {
    PyErr_Clear();
    return writable ? Reason::out : Reason::not_exportable;
  }
  const Reason reason = convert(view, out);
  PyBuffer_Release(&view);
  return reason;
}

// False when a buffer has to be asked for: another dtype, odd strides or an unwilling output.
bool read_directly(PyObject* object, bool writable, Array* out) {
  const auto* array = reinterpret_cast<const ArrayObject*>(object);
  if (array->dtype != fp32_dtype && array->dtype != fp16_dtype) return false;
  const auto flags = static_cast<unsigned>(array->flags);
  if (array->ndim != 2 || (writable && ((flags & kWriteable) == 0 || (flags & kWarnOnWrite) != 0))) {
    return false;
  }
  out->dtype = array->dtype == fp32_dtype ? Dtype::fp32 : Dtype::fp16;
  const Py_ssize_t size = element_bytes(out->dtype);
  out->device_kind = DeviceKind::cpu;
  out->device = 0;
  out->address = reinterpret_cast<uint64_t>(array->data);
  out->shape[0] = array->shape[0];
  out->shape[1] = array->shape[1];
  const Py_ssize_t odd = static_cast<Py_ssize_t>(out->address) | array->strides[0] | array->strides[1];
  if ((odd & (size - 1)) != 0) return false;
  out->strides[0] = array->strides[0] / size;
  out->strides[1] = array->strides[1] / size;
  return true;
}

bool same(const Array& a, const Array& b) {
  return a.address == b.address && a.shape[0] == b.shape[0] && a.shape[1] == b.shape[1] &&
         a.strides[0] == b.strides[0] && a.strides[1] == b.strides[1] && a.dtype == b.dtype;
}

// Whether a sample of the dtype, as made, transposed and read-only, reads directly as through a buffer.
bool reads_alike(PyObject* dtype) {
  PyObject* sample = PyObject_CallFunction(empty_function, "((ii)O)", 3, 5, dtype);
  PyObject* turned = sample == nullptr ? nullptr : PyObject_GetAttrString(sample, "T");
  bool alike = turned != nullptr;
  for (PyObject* one : {sample, turned}) {
    Array direct, buffer;
    alike = alike && ndarray == Py_TYPE(one) && reinterpret_cast<ArrayObject*>(one)->ndim == 2 &&
            read_directly(one, true, &direct) && read_buffer(one, true, &buffer) == Reason::none &&
            same(direct, buffer);
  }
  PyObject* done = alike ? PyObject_CallMethod(sample, "setflags", "i", 0) : nullptr;
  Array ignored;
  alike = done != nullptr && !read_directly(sample, true, &ignored) && read_directly(sample, false, &ignored);
  Py_XDECREF(done);
  Py_XDECREF(turned);
  Py_XDECREF(sample);
  PyErr_Clear();
  return alike;
}

void find_dtypes(PyObject* module) {
  if (ndarray->tp_basicsize < static_cast<Py_ssize_t>(sizeof(ArrayObject))) return;
  fp32_dtype = PyObject_CallMethod(module, "dtype", "s", "float32");
  fp16_dtype = PyObject_CallMethod(module, "dtype", "s", "float16");
  PyErr_Clear();
  if (fp32_dtype != nullptr && fp16_dtype != nullptr && reads_alike(fp32_dtype) && reads_alike(fp16_dtype)) {
    return;
  }
  Py_CLEAR(fp32_dtype);
  Py_CLEAR(fp16_dtype);
}

}  // namespace

bool is_array_type(PyTypeObject* type) {
  if (ndarray == nullptr) find_numpy();
  return type == ndarray && type != nullptr;
}

Reason read(PyObject* array, bool writable, Array* out) {
  if (fp32_dtype != nullptr && read_directly(array, writable, out)) return Reason::none;
  return read_buffer(array, writable, out);
}

bool reads_directly() { return fp32_dtype != nullptr; }

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
