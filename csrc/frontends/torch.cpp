#include "frontends/torch.hpp"

#include "frontends/torch_flags.hpp"
#include "frontends/torch_modes.hpp"
#include "third_party/dlpack/dlpack.h"

namespace ktlib::frontends::torch {
namespace {

// What was found in the loaded torch. Filled under the GIL, once; never released, as torch cannot be
// unloaded.
struct Torch {
  PyTypeObject* tensor = nullptr;
  PyTypeObject* parameter = nullptr;
  const DLPackExchangeAPI* api = nullptr;
  const PyGetSetDef* requires_grad = nullptr;
  PyCFunction is_neg = nullptr;
  PyObject* is_grad_enabled = nullptr;
  PyObject* forward_ad = nullptr;  // the module torch.autograd.forward_ad
  PyObject* increment_version = nullptr;
  PyObject* matmul = nullptr;
  TorchFlags flags;
  TorchModes modes;
};
Torch found;
bool refused = false;  // this torch has no usable exchange API

// Calibration fails where the first product runs inside saved-tensor hooks, a functorch transform or the
// like. It is tried again after 8, 16, 32 ... products, and given up after the last.
constexpr uint32_t kFirstRetry = 8, kLastRetry = 1u << 16;
uint32_t uncalibrated_products = 0;

// Addresses below may be the offset of a view whose storage has been freed: torch is asked. The bound is
// where Linux puts executables that are not position-independent; Debian's python3 is one, its heap lies
// right behind, and asking for each of its small tensors cost 0.7 us a call (EPYC).
constexpr uint64_t kSurelyMemory = uint64_t{4} << 20;

PyObject* attribute(PyObject* object, const char* name) {
  PyObject* value = object == nullptr ? nullptr : PyObject_GetAttrString(object, name);
  if (value == nullptr) PyErr_Clear();
  return value;
}

// Follows prev_api to the layout that this header describes; null when there is none.
const DLPackExchangeAPI* exchange_api(PyObject* type) {
  PyObject* capsule = attribute(type, "__dlpack_c_exchange_api__");
  if (capsule == nullptr) return nullptr;
  auto* header = static_cast<DLPackExchangeAPIHeader*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (header == nullptr) PyErr_Clear();
  while (header != nullptr && header->version.major != DLPACK_MAJOR_VERSION) header = header->prev_api;
  const auto* api = reinterpret_cast<const DLPackExchangeAPI*>(header);
  if (api != nullptr &&
      (api->managed_tensor_allocator == nullptr || api->managed_tensor_to_py_object_no_sync == nullptr ||
       api->managed_tensor_from_py_object_no_sync == nullptr || api->current_work_stream == nullptr)) {
    api = nullptr;
  }
  return api;  // the capsule stays referenced on purpose
}

// torch.Tensor's own getters, called without the descriptor protocol around them.
bool find_getters(PyTypeObject* type) {
  PyObject* grad = attribute(reinterpret_cast<PyObject*>(type), "requires_grad");
  PyObject* neg = attribute(reinterpret_cast<PyObject*>(type), "is_neg");
  if (grad == nullptr || neg == nullptr || Py_TYPE(grad) != &PyGetSetDescr_Type ||
      Py_TYPE(neg) != &PyMethodDescr_Type) {
    return false;
  }
  const PyMethodDef* method = reinterpret_cast<PyMethodDescrObject*>(neg)->d_method;
  if (method->ml_flags != METH_NOARGS) return false;
  found.requires_grad = reinterpret_cast<PyGetSetDescrObject*>(grad)->d_getset;
  found.is_neg = method->ml_meth;
  return true;
}

void calibrate(PyObject* module) {
  if (!found.flags.valid()) found.flags.calibrate(module);
  if (!found.modes.direct()) found.modes.calibrate(module);
}

void calibrate_again() {
  const uint32_t count = ++uncalibrated_products;
  if (count < kFirstRetry || count > kLastRetry || (count & (count - 1)) != 0) return;
  PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");  // borrowed
  if (module != nullptr) calibrate(module);
}

void find_torch() {
  PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");  // borrowed
  PyObject* tensor = attribute(module, "Tensor");
  PyObject* nn = attribute(module, "nn");
  PyObject* parameter = attribute(nn, "Parameter");
  Py_XDECREF(nn);
  if (tensor == nullptr || parameter == nullptr) return;  // torch is not imported, or only half
  found.is_grad_enabled = attribute(module, "is_grad_enabled");
  PyObject* c_module = attribute(module, "_C");
  found.increment_version = attribute(c_module, "_increment_version");
  PyObject* functions = attribute(c_module, "_VariableFunctions");
  found.matmul = attribute(functions, "matmul");
  if (found.matmul == nullptr) found.matmul = attribute(module, "matmul");
  Py_XDECREF(functions);
  Py_XDECREF(c_module);
  PyObject* autograd = attribute(module, "autograd");
  found.forward_ad = attribute(autograd, "forward_ad");
  Py_XDECREF(autograd);
  found.api = exchange_api(tensor);
  auto* type = reinterpret_cast<PyTypeObject*>(tensor);
  if (found.api == nullptr || found.is_grad_enabled == nullptr || found.increment_version == nullptr ||
      found.matmul == nullptr || !find_getters(type)) {
    refused = true;
    return;
  }
  calibrate(module);
  found.parameter = reinterpret_cast<PyTypeObject*>(parameter);
  found.tensor = type;
}

bool truth(PyObject* answer) {
  if (answer == nullptr) {
    PyErr_Clear();
    return true;  // unknown: leave for the Python path
  }
  const bool value = answer != Py_False;
  Py_DECREF(answer);
  return value;
}

// Inside torch.autograd.forward_ad.dual_level, also of another thread.
bool in_dual_level() {
  PyObject* level = attribute(found.forward_ad, "_current_level");
  const long value = level == nullptr ? 0 : PyLong_AsLong(level);  // unknown: torch decides
  Py_XDECREF(level);
  PyErr_Clear();
  return value >= 0;
}

bool has_memory(PyObject* tensor, const Array& array) {
  if (array.address >= kSurelyMemory || array.shape[0] == 0 || array.shape[1] == 0) return true;
  if (array.address == 0) return false;
  PyObject* storage = PyObject_CallMethod(tensor, "untyped_storage", nullptr);
  PyObject* address = storage == nullptr ? nullptr : PyObject_CallMethod(storage, "data_ptr", nullptr);
  const bool has = address != nullptr && PyObject_IsTrue(address) == 1;
  Py_XDECREF(address);
  Py_XDECREF(storage);
  PyErr_Clear();
  return has;
}

DLDataType dl_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::fp16:
      return {kDLFloat, 16, 1};
    case Dtype::bf16:
      return {kDLBfloat, 16, 1};
    case Dtype::fp32:
      break;
  }
  return {kDLFloat, 32, 1};
}

struct AllocationError {
  char text[256] = "torch could not allocate the output";
};

void set_error(void* context, const char*, const char* message) {
  PyOS_snprintf(static_cast<AllocationError*>(context)->text, sizeof(AllocationError::text), "%s", message);
}

Reason read_managed(PyObject* tensor, DLTensor* out, DLManagedTensorVersioned** owner) {
  if (found.api->managed_tensor_from_py_object_no_sync(tensor, owner) != 0) return Reason::not_exportable;
  *out = (*owner)->dl_tensor;
  return Reason::none;
}

Reason convert(const DLTensor& view, Array* out) {
  if (view.ndim != 2) return Reason::not_matrices;
  const DLDataType type = view.dtype;
  if (type.lanes != 1) return Reason::dtype;
  if (type.code == kDLFloat && type.bits == 32) {
    out->dtype = Dtype::fp32;
  } else if (type.code == kDLFloat && type.bits == 16) {
    out->dtype = Dtype::fp16;
  } else if (type.code == kDLBfloat && type.bits == 16) {
    out->dtype = Dtype::bf16;
  } else {
    return Reason::dtype;
  }
  if (view.device.device_type == kDLCPU) {
    out->device_kind = DeviceKind::cpu;
  } else if (view.device.device_type == kDLCUDA) {
    out->device_kind = DeviceKind::cuda;
  } else {
    return Reason::other_types;
  }
  out->device = view.device.device_id;
  out->address = reinterpret_cast<uint64_t>(view.data) + view.byte_offset;
  out->shape[0] = view.shape[0];
  out->shape[1] = view.shape[1];
  if (view.strides == nullptr) {  // the protocol's spelling of contiguous
    out->strides[0] = view.shape[1];
    out->strides[1] = 1;
  } else {
    out->strides[0] = view.strides[0];
    out->strides[1] = view.strides[1];
  }
  return Reason::none;
}

}  // namespace

bool is_tensor_type(PyTypeObject* type) {
  if (type == found.tensor || type == found.parameter) return type != nullptr;
  if (found.tensor != nullptr || refused) return false;
  find_torch();
  return found.tensor != nullptr && (type == found.tensor || type == found.parameter);
}

namespace {

Reason read_memory(PyObject* tensor, Array* out) {
  DLTensor view;
  if (found.api->dltensor_from_py_object_no_sync != nullptr) {
    if (found.api->dltensor_from_py_object_no_sync(tensor, &view) == 0) return convert(view, out);
    PyErr_Clear();  // meta, sparse, quantised, or a functorch wrapper
    return Reason::not_exportable;
  }
  DLManagedTensorVersioned* owner = nullptr;
  Reason reason = read_managed(tensor, &view, &owner);
  if (reason != Reason::none) {
    PyErr_Clear();
    return reason;
  }
  reason = convert(view, out);
  if (owner->deleter != nullptr) owner->deleter(owner);  // the caller's reference keeps the memory
  return reason;
}

}  // namespace

Reason read(PyObject* tensor, Array* out) {
  const Reason reason = read_memory(tensor, out);
  return reason == Reason::none && !has_memory(tensor, *out) ? Reason::not_exportable : reason;
}

Reason check_flags(PyObject* tensor, Dtype dtype) {
  if (found.flags.valid()) {
    if (found.flags.is_negative(tensor)) return Reason::negative_bit;
    if (!found.flags.has_autograd_state(tensor)) return Reason::none;
  } else if (dtype != Dtype::bf16 && truth(found.is_neg(tensor, nullptr))) {
    return Reason::negative_bit;
  }
  if (truth(found.requires_grad->get(tensor, found.requires_grad->closure)) &&
      truth(PyObject_CallNoArgs(found.is_grad_enabled))) {
    return Reason::needs_grad;
  }
  return in_dual_level() ? Reason::forward_tangent : Reason::none;  // no_grad keeps tangents
}

bool autocast_enabled(DeviceKind kind) { return found.modes.autocast(kind); }

Reason check_modes() {
  if (!found.flags.valid() || !found.modes.direct()) calibrate_again();
  if (found.modes.dispatch_mode()) return Reason::dispatch_mode;
  if (found.modes.function_mode()) return Reason::function_mode;
  return found.modes.tracing() ? Reason::tracing : Reason::none;
}

bool flags_calibrated() { return found.flags.valid(); }

bool modes_direct() { return found.modes.direct(); }

bool count_write(PyObject* tensor) {
  if (found.flags.valid() && found.flags.is_private(tensor)) return true;
  PyObject* tensors = PyTuple_Pack(1, tensor);
  if (tensors == nullptr) return false;
  PyObject* result = PyObject_CallOneArg(found.increment_version, tensors);
  Py_DECREF(tensors);
  Py_XDECREF(result);
  return result != nullptr;
}

PyObject* empty(int64_t m, int64_t n, const Array& like, Array* out) {
  int64_t shape[2] = {m, n};
  DLTensor prototype = {};
  prototype.device = {like.device_kind == DeviceKind::cuda ? kDLCUDA : kDLCPU, like.device};
  prototype.ndim = 2;
  prototype.dtype = dl_dtype(like.dtype);
  prototype.shape = shape;
  DLManagedTensorVersioned* made = nullptr;
  AllocationError error;
  if (found.api->managed_tensor_allocator(&prototype, &made, &error, set_error) != 0) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.text);
    return nullptr;
  }
  const Reason reason = convert(made->dl_tensor, out);
  void* tensor = nullptr;
  if (reason != Reason::none || found.api->managed_tensor_to_py_object_no_sync(made, &tensor) != 0) {
    if (!PyErr_Occurred())
      PyErr_SetString(PyExc_RuntimeError, "torch's allocator answered with another tensor");
    return nullptr;
  }
  return static_cast<PyObject*>(tensor);
}

PyObject* vendor_matmul() { return found.matmul; }

bool current_stream(int device, void** stream) {
  if (found.api->current_work_stream(kDLCUDA, device, stream) == 0) return true;
  PyErr_Clear();
  return false;
}

}  // namespace ktlib::frontends::torch
