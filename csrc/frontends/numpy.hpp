// NumPy arrays as they lie in memory, or through the buffer protocol, without NumPy's headers.
#pragma once

#include "frontends/array.hpp"

namespace ktlib::frontends::numpy {

// True when `type` is exactly numpy.ndarray. Never imports NumPy.
bool is_array_type(PyTypeObject* type);

// The caller's reference keeps the memory; no buffer stays exported. `writable` asks for a writable array.
Reason read(PyObject* array, bool writable, Array* out);

// True when arrays of the plain dtypes are read without a buffer.
bool reads_directly();

// A new C-contiguous [m, n] array of `like`'s dtype; null with a Python error set.
PyObject* empty(int64_t m, int64_t n, PyObject* like, Array* out);

// The library's own matmul, borrowed.
PyObject* vendor_matmul();

}  // namespace ktlib::frontends::numpy
