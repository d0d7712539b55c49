#include "launch/prepare.hpp"

#include <limits>

#include "frontends/cupy.hpp"
#include "frontends/numpy.hpp"
#include "frontends/torch.hpp"

namespace ktlib {
namespace {

using frontends::Array;
using frontends::Framework;
using frontends::Reason;

constexpr uint64_t kMaxAlign = 16;
constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;  // a tensor map's limit

Framework framework_of(PyTypeObject* type) {
  if (frontends::numpy::is_array_type(type)) return Framework::numpy;  // first: the others may have to search
  if (frontends::torch::is_tensor_type(type)) return Framework::torch;
  if (frontends::cupy::is_array_type(type)) return Framework::cupy;
  return Framework::none;
}

Reason read(Framework framework, PyObject* object, bool writable, Array* out) {
  switch (framework) {
    case Framework::torch: {
      const Reason reason = frontends::torch::read(object, out);
      return reason != Reason::none ? reason : frontends::torch::check_flags(object, out->dtype);
    }
    case Framework::numpy:
      return frontends::numpy::read(object, writable, out);
    case Framework::cupy:
      return frontends::cupy::read(object, out);
    case Framework::none:
      break;
  }
  return Reason::other_types;
}

bool same_place(const Array& a, const Array& b) {
  return a.device_kind == b.device_kind && a.device == b.device;
}

uint8_t lowest_bit(uint64_t value) {
  value |= kMaxAlign;
  return static_cast<uint8_t>(value & (~value + 1));
}

// Bytes from the first element to behind the last.
uint64_t extent_bytes(const Array& array, const Matrix& matrix) {
  const int64_t rows = matrix.transposed ? array.shape[1] : array.shape[0];
  const int64_t row = matrix.transposed ? array.shape[0] : array.shape[1];
  return static_cast<uint64_t>((rows - 1) * matrix.ld + row) * element_bytes(array.dtype);
}

Reason prepare_out(PyObject* object, const Array& a, const Array& b, const Matrix& am, const Matrix& bm,
                   Prepared* prepared) {
  if (framework_of(Py_TYPE(object)) != prepared->framework) return Reason::out;
  Array out;
  Matrix matrix;
  if (read(prepared->framework, object, true, &out) != Reason::none) return Reason::out;
  const bool fits = out.address != 0 && out.shape[0] == a.shape[0] && out.shape[1] == b.shape[1] &&
                    out.dtype == a.dtype && same_place(out, a) && as_matrix(out, &matrix) &&
                    !matrix.transposed && surely_disjoint(out, matrix, a, am) &&
                    surely_disjoint(out, matrix, b, bm);
  if (!fits) return Reason::out;
  prepared->operands.c = out.address;
  prepared->operands.ldc = matrix.ld;
  return Reason::none;
}

}  // namespace

bool as_matrix(const Array& array, Matrix* out) {
  const int64_t rows = array.shape[0], columns = array.shape[1];
  const int64_t row_stride = rows == 1 ? columns : array.strides[0];
  const int64_t column_stride = columns == 1 ? 1 : array.strides[1];
  if (column_stride == 1 && row_stride >= columns) {
    *out = {false, row_stride};
  } else if ((rows == 1 || array.strides[0] == 1) && array.strides[1] >= rows) {
    *out = {true, array.strides[1]};
  } else {
    return false;
  }
  return out->ld < (array.dtype == Dtype::fp32 ? kMaxStrideBytes / 4 : kMaxStrideBytes / 2);
}

bool surely_disjoint(const Array& a, const Matrix& a_matrix, const Array& b, const Matrix& b_matrix) {
  const uint64_t a_end = a.address + extent_bytes(a, a_matrix);
  const uint64_t b_end = b.address + extent_bytes(b, b_matrix);
  if (a_end <= b.address || b_end <= a.address) return true;
  if (a_matrix.ld != b_matrix.ld || a.dtype != b.dtype) return false;
  const uint64_t size = element_bytes(a.dtype);
  const uint64_t row = static_cast<uint64_t>(a_matrix.ld) * size;
  const uint64_t a_row = static_cast<uint64_t>(a_matrix.transposed ? a.shape[0] : a.shape[1]) * size;
  const uint64_t b_row = static_cast<uint64_t>(b_matrix.transposed ? b.shape[0] : b.shape[1]) * size;
  const uint64_t ahead =
      b.address >= a.address ? (b.address - a.address) % row : (row - (a.address - b.address) % row) % row;
  return ahead >= a_row && ahead + b_row <= row;
}

Reason prepare(PyObject* a_object, PyObject* b_object, PyObject* out_object, Prepared* prepared) {
  const Framework framework = framework_of(Py_TYPE(a_object));
  if (framework == Framework::none) return Reason::other_types;
  if (Py_TYPE(b_object) != Py_TYPE(a_object) && framework_of(Py_TYPE(b_object)) != framework) {
    return Reason::other_types;
  }
  Array& a = prepared->like;
  Array b;
  Reason reason = framework == Framework::torch ? frontends::torch::check_modes() : Reason::none;
  if (reason == Reason::none) reason = read(framework, a_object, false, &a);
  if (reason == Reason::none) reason = read(framework, b_object, false, &b);
  if (reason != Reason::none) return reason;
  if (framework == Framework::torch && frontends::torch::autocast_enabled(a.device_kind)) {
    return Reason::autocast;
  }
  if (a.dtype != b.dtype) return Reason::dtype;
  if (!same_place(a, b)) return Reason::devices_differ;
  const int64_t m = a.shape[0], k = a.shape[1], n = b.shape[1];
  if (k != b.shape[0]) return Reason::shapes_differ;
  if (m == 0 || n == 0 || k == 0) return Reason::empty;
  if (a.address == 0 || b.address == 0) return Reason::not_exportable;  // freed memory
  constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max();
  Matrix am, bm;
  if (!as_matrix(a, &am) || !as_matrix(b, &bm) || m > kMaxExtent || n > kMaxExtent || k > kMaxExtent) {
    return Reason::strides;
  }
  prepared->framework = framework;
  prepared->device_kind = a.device_kind;
  prepared->device = a.device;
  prepared->operands = {a.address,
                        b.address,
                        0,
                        am.ld,
                        bm.ld,
                        n,
                        static_cast<uint32_t>(m),
                        static_cast<uint32_t>(n),
                        static_cast<uint32_t>(k)};
  if (out_object != nullptr) {
    reason = prepare_out(out_object, a, b, am, bm, prepared);
    if (reason != Reason::none) return reason;
  }
  const uint64_t size = element_bytes(a.dtype);
  const GemmOperands& gemm = prepared->operands;
  const uint64_t of_ab =
      gemm.a | gemm.b | static_cast<uint64_t>(gemm.lda) * size | static_cast<uint64_t>(gemm.ldb) * size;
  Call& call = prepared->call;
  call.m = gemm.m;
  call.n = gemm.n;
  call.k = gemm.k;
  call.layout = static_cast<Layout>((am.transposed ? 2 : 0) + (bm.transposed ? 1 : 0));
  call.dtype = a.dtype;
  call.align_ab = lowest_bit(of_ab);
  call.align = lowest_bit(of_ab | gemm.c | static_cast<uint64_t>(gemm.ldc) * size);
  return Reason::none;
}

}  // namespace ktlib
