#include "frontends/cupy.hpp"

#include <cstring>

namespace ktlib::frontends::cupy {
namespace {

struct Names {
  PyObject* data = PyUnicode_InternFromString("data");
  PyObject* ptr = PyUnicode_InternFromString("ptr");
  PyObject* device_id = PyUnicode_InternFromString("device_id");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* strides = PyUnicode_InternFromString("strides");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* name = PyUnicode_InternFromString("name");
};

const Names& names() {
  static const Names all;
  return all;
}

PyTypeObject* ndarray = nullptr;
PyObject* module = nullptr;
PyObject* matmul_function = nullptr;
PyObject* dtypes[3] = {};  // numpy.dtype objects seen, by Dtype: NumPy keeps one of each
using StreamFunction = intptr_t (*)();
StreamFunction stream_function = nullptr;

// CuPy exports its C-level functions in capsules named by their signature.
StreamFunction find_stream_function() {
  PyObject* stream = PyImport_ImportModule("cupy_backends.cuda.stream");
  PyObject* table = stream == nullptr ? nullptr : PyObject_GetAttrString(stream, "__pyx_capi__");
  PyObject* capsule = table == nullptr ? nullptr : PyMapping_GetItemString(table, "get_current_stream_ptr");
  void* function = nullptr;
  if (capsule != nullptr && PyCapsule_IsValid(capsule, "intptr_t (void)")) {
    function = PyCapsule_GetPointer(capsule, "intptr_t (void)");
  }
  PyErr_Clear();
  Py_XDECREF(capsule);
  Py_XDECREF(table);
  Py_XDECREF(stream);
  return reinterpret_cast<StreamFunction>(function);
}

bool integer(PyObject* owned, int64_t* out) {
  if (owned == nullptr) return false;
  *out = PyLong_AsLongLong(owned);
  Py_DECREF(owned);
  return !(*out == -1 && PyErr_Occurred() != nullptr);
}

bool pair(PyObject* owned, int64_t* out, Py_ssize_t* size) {
  if (owned == nullptr) return false;
  const bool is_tuple = PyTuple_Check(owned);
  *size = is_tuple ? PyTuple_GET_SIZE(owned) : -1;
  bool fine = is_tuple;
  for (Py_ssize_t i = 0; fine && *size == 2 && i < 2; ++i) {
    out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(owned, i));
    fine = !(out[i] == -1 && PyErr_Occurred() != nullptr);
  }
  Py_DECREF(owned);
  return fine;
}

bool parse_dtype(PyObject* dtype, Dtype* out) {
  for (int i = 0; i < 3; ++i) {
    if (dtype == dtypes[i]) {
      *out = static_cast<Dtype>(i);
      return true;
    }
  }
  static constexpr const char* kNumpyNames[] = {"float16", "bfloat16", "float32"};
  PyObject* name = PyObject_GetAttr(dtype, names().name);
  const char* text = name == nullptr ? nullptr : PyUnicode_AsUTF8(name);
  bool known = false;
  for (int i = 0; text != nullptr && i < 3; ++i) {
    if (std::strcmp(text, kNumpyNames[i]) != 0) continue;
    *out = static_cast<Dtype>(i);
    known = true;
    if (dtypes[i] == nullptr) {
      Py_INCREF(dtype);
      dtypes[i] = dtype;
    }
  }
  Py_XDECREF(name);
  return known;
}

Reason read_attributes(PyObject* array, Array* out) {
  Py_ssize_t shape_size = 0, strides_size = 0;
  if (!pair(PyObject_GetAttr(array, names().shape), out->shape, &shape_size)) return Reason::not_exportable;
  if (shape_size != 2) return Reason::not_matrices;
  PyObject* dtype = PyObject_GetAttr(array, names().dtype);
  const bool known = dtype != nullptr && parse_dtype(dtype, &out->dtype);
  Py_XDECREF(dtype);
  if (!known) return Reason::dtype;
  if (!pair(PyObject_GetAttr(array, names().strides), out->strides, &strides_size) || strides_size != 2) {
    return Reason::not_exportable;
  }
  PyObject* data = PyObject_GetAttr(array, names().data);
  int64_t address = 0, device = 0;
  const bool placed = data != nullptr && integer(PyObject_GetAttr(data, names().ptr), &address) &&
                      integer(PyObject_GetAttr(data, names().device_id), &device);
  Py_XDECREF(data);
  if (!placed) return Reason::not_exportable;
  const int64_t size = element_bytes(out->dtype);
  for (int axis = 0; axis < 2; ++axis) {
    if (out->shape[axis] > 1 && out->strides[axis] % size != 0) return Reason::strides;
    out->strides[axis] /= size;
  }
  out->device_kind = DeviceKind::cuda;
  out->device = static_cast<int32_t>(device);
  out->address = static_cast<uint64_t>(address);
  return Reason::none;
}

}  // namespace

bool is_array_type(PyTypeObject* type) {
  if (type == ndarray && type != nullptr) return true;
  if (std::strstr(type->tp_name, "ndarray") == nullptr) return false;
  PyObject* loaded = PyDict_GetItemString(PyImport_GetModuleDict(), "cupy");  // borrowed
  PyObject* found = loaded == nullptr ? nullptr : PyObject_GetAttrString(loaded, "ndarray");
  if (found == nullptr) {
    PyErr_Clear();
    return false;
  }
  if (reinterpret_cast<PyTypeObject*>(found) != type) {
    Py_DECREF(found);
    return false;
  }
  PyObject* matmul = PyObject_GetAttrString(loaded, "matmul");
  if (matmul == nullptr) {
    PyErr_Clear();
    Py_DECREF(found);
    return false;
  }
  matmul_function = matmul;
  ndarray = type;  // all three stay referenced
  Py_INCREF(loaded);
  module = loaded;
  stream_function = find_stream_function();
  return true;
}

Reason read(PyObject* array, Array* out) {
  const Reason reason = read_attributes(array, out);
  if (reason != Reason::none) PyErr_Clear();
  return reason;
}

PyObject* vendor_matmul() { return matmul_function; }

PyObject* empty(int64_t m, int64_t n, PyObject* like, Array* out) {
  PyObject* shape = Py_BuildValue("(LL)", static_cast<long long>(m), static_cast<long long>(n));
  PyObject* dtype = PyObject_GetAttr(like, names().dtype);
  PyObject* made = nullptr;
  if (shape != nullptr && dtype != nullptr) {
    PyObject* arguments[2] = {shape, dtype};
    made = PyObject_Vectorcall(reinterpret_cast<PyObject*>(ndarray), arguments, 2, nullptr);
  }
  Py_XDECREF(shape);
  Py_XDECREF(dtype);
  if (made != nullptr && read(made, out) != Reason::none) {
    Py_DECREF(made);
    PyErr_SetString(PyExc_RuntimeError, "cupy.ndarray answered with an array of another kind");
    return nullptr;
  }
  return made;
}

bool current_stream(void** stream) {
  intptr_t value = 0;
  if (stream_function != nullptr) {
    value = stream_function();
  } else {
    PyObject* cuda = PyObject_GetAttrString(module, "cuda");
    PyObject* current = cuda == nullptr ? nullptr : PyObject_CallMethod(cuda, "get_current_stream", nullptr);
    int64_t address = 0;
    if (current == nullptr || !integer(PyObject_GetAttr(current, names().ptr), &address)) address = 0;
    Py_XDECREF(current);
    Py_XDECREF(cuda);
    value = static_cast<intptr_t>(address);
  }
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return false;
  }
  *stream = reinterpret_cast<void*>(value);
  return true;
}

}  // namespace ktlib::frontends::cupy
