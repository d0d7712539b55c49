// CuPy arrays through their attributes (CuPy offers no exchange API), without linking CuPy.
#pragma once

#include "frontends/array.hpp"

namespace ktlib::frontends::cupy {

// True when `type` is exactly cupy.ndarray. Never imports CuPy.
bool is_array_type(PyTypeObject* type);

Reason read(PyObject* array, Array* out);

// A new C-contiguous [m, n] array of `like`'s dtype on the current device; null with a Python error set.
PyObject* empty(int64_t m, int64_t n, PyObject* like, Array* out);

// The current stream of CuPy's current device; false (no Python error) when CuPy cannot say.
bool current_stream(void** stream);

// The library's own matmul, borrowed.
PyObject* vendor_matmul();

}  // namespace ktlib::frontends::cupy
