// From two Python operands (and out) to a Call: which library, which layout, which alignment, or why the call
// is for the Python path. Used by matmul and by explain, so that both see the same thing.
#pragma once

#include "frontends/array.hpp"
#include "launch/cuda_kernel.hpp"

namespace ktlib {

// A matrix as a kernel takes it: stored row-major (`transposed` false) or as the transpose of a row-major
// one.
struct Matrix {
  bool transposed;
  int64_t ld;  // elements
};

// How a kernel may read `array`: unit stride in one direction and rows that do not overlap; row-major where
// both fit. The stride of an axis with one element means nothing. False for expanded, negative and double
// strides.
bool as_matrix(const frontends::Array& array, Matrix* out);

// True when no byte belongs to both, false when some may: exact for disjoint address ranges and for column
// slices of one buffer.
bool surely_disjoint(const frontends::Array& a, const Matrix& a_matrix, const frontends::Array& b,
                     const Matrix& b_matrix);

struct Prepared {
  frontends::Framework framework = frontends::Framework::none;
  DeviceKind device_kind = DeviceKind::cpu;
  int32_t device = 0;
  Call call;
  GemmOperands operands;  // c is zero when there is no out
  frontends::Array like;  // a, to allocate the output beside
};

// `out` may be null. Leaves no Python error set.
frontends::Reason prepare(PyObject* a, PyObject* b, PyObject* out, Prepared* prepared);

}  // namespace ktlib
