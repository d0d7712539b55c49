// Torch tensors through the DLPack C exchange API (torch 2.10 and later), without linking torch.
#pragma once

#include "frontends/array.hpp"

namespace ktlib::frontends::torch {

// True when `type` is exactly torch.Tensor or torch.nn.Parameter and torch offers the exchange API. Never
// imports torch: it must be in sys.modules already.
bool is_tensor_type(PyTypeObject* type);

Reason read(PyObject* tensor, Array* out);

// Guards that the exchange API does not make: a gradient or a tangent is wanted, or the memory holds negated
// values.
Reason check_flags(PyObject* tensor, Dtype dtype);

// True when check_flags reads the flags directly (torch_flags.hpp) instead of calling torch for each operand.
bool flags_calibrated();

// The same for autocast_enabled and check_modes (torch_modes.hpp).
bool modes_direct();

// Whether torch.autocast is on in this thread for operands on such a device.
bool autocast_enabled(DeviceKind kind);

// Whether something in this thread has to see every torch operation: a mode (tensors made under it may be
// fake) or a tracer.
Reason check_modes();

// Records a write that torch did not see, so that autograd refuses a stale saved tensor. False with a Python
// error set.
bool count_write(PyObject* tensor);

// A new contiguous [m, n] tensor from torch's allocator; null with a Python error set.
PyObject* empty(int64_t m, int64_t n, const Array& like, Array* out);

// The stream torch enqueues on for a CUDA device; false (no Python error) when torch cannot say.
bool current_stream(int device, void** stream);

// The library's own matmul, borrowed; whatever torch.matmul has been replaced by.
PyObject* vendor_matmul();

}  // namespace ktlib::frontends::torch
