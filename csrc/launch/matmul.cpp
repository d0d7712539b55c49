// One call: parse (prepare.cpp), look up (a memo, then Index), run, or leave for Python with a reason.
// Nothing here allocates but the output, and nothing locks but a kernel's first load.
#include "launch/matmul.hpp"

#include <cstring>

#include "common/check.hpp"
#include "frontends/cupy.hpp"
#include "frontends/numpy.hpp"
#include "frontends/torch.hpp"
#include "frontends/torch_reduction.hpp"
#include "launch/bind_dispatch.hpp"
#include "launch/prepare.hpp"
#include "launch/registry.hpp"

namespace py = pybind11;

namespace ktlib {
namespace {

using frontends::Framework;
using frontends::Reason;

// Products longer than this (about 50 us on one core) let other Python threads run meanwhile.
constexpr uint64_t kReleaseGilMacs = 1u << 20;

PyObject* fallback = nullptr;  // fn(a, b, out, reason)
PyObject* loader = nullptr;    // fn(): calls set_packs; run before the first selection
PyObject* reason_strings[static_cast<int>(Reason::kCount)] = {};
PyObject* out_name = nullptr;
PyObject* out_names = nullptr;  // ("out",)
std::atomic<bool> enabled{true};

// What selection answered for one call, remembered by each thread.
struct Memo {
  uint64_t generation;  // 0: empty
  Call call;
  int32_t device;
  DeviceKind device_kind;
  Reason reason;  // none: run the kernel
  const KernelSlot* slot;
  uint32_t group_m;
};

constexpr uint32_t kMemoSlots = 64;  // a power of two
struct Memory {
  const Memo* last;
  Memo recent[kMemoSlots];
};
thread_local Memory memory;

uint32_t memo_slot(const Call& call) {
  uint64_t hash = (uint64_t{call.m} * 0x9E3779B97F4A7C15u) ^ (uint64_t{call.n} * 0xC2B2AE3D27D4EB4Fu) ^
                  (uint64_t{call.k} * 0x165667B19E3779F9u) ^ (static_cast<uint64_t>(call.layout) << 50) ^
                  (static_cast<uint64_t>(call.dtype) << 53);
  hash *= 0xFF51AFD7ED558CCDu;
  return static_cast<uint32_t>(hash >> 40) % kMemoSlots;
}

bool holds(const Memo& memo, uint64_t generation, const Prepared& prepared) {
  return memo.generation == generation && memo.call == prepared.call && memo.device == prepared.device &&
         memo.device_kind == prepared.device_kind;
}

Reason vendor_reason(VendorReason reason) {
  switch (reason) {
    case VendorReason::none:
      return Reason::none;
    case VendorReason::no_database:
      return Reason::no_database;
    case VendorReason::vendor_faster:
      return Reason::vendor_faster;
    case VendorReason::not_tuned:
      return Reason::not_tuned;
    case VendorReason::misaligned:
      return Reason::misaligned;
    case VendorReason::unsupported:
      break;
  }
  return Reason::unsupported;
}

void select(const Registry& registry, const Prepared& prepared, Memo* memo) {
  *memo = {0, prepared.call, prepared.device, prepared.device_kind, Reason::no_driver, nullptr, 1};
  std::string ignored;
  const DeviceIndex* index =
      prepared.device_kind == DeviceKind::cpu ? &registry.cpu() : registry.cuda(prepared.device, &ignored);
  if (index == nullptr) return;  // not remembered: the driver may be usable later
  const Choice choice = index->index().find(prepared.call);
  memo->reason = vendor_reason(choice.vendor_reason);
  if (choice.kernel == nullptr) {
    if (memo->reason == Reason::none) memo->reason = Reason::not_tuned;
  } else {
    memo->slot = &index->slot(choice);
    if (choice.entry != nullptr) memo->group_m = choice.entry->group_m;
    memo->reason =
        memo->slot->cpu != nullptr || memo->slot->cuda != nullptr ? Reason::none : Reason::kernel_unusable;
  }
  memo->generation = registry.generation();
}

const Memo& find_memo(const Registry& registry, const Prepared& prepared) {
  Memory& mine = memory;
  if (mine.last != nullptr && holds(*mine.last, registry.generation(), prepared)) return *mine.last;
  Memo& memo = mine.recent[memo_slot(prepared.call)];
  if (!holds(memo, registry.generation(), prepared)) select(registry, prepared, &memo);
  mine.last = &memo;
  return memo;
}

PyObject* make_output(PyObject* a, Prepared* prepared) {
  frontends::Array made;
  const int64_t m = prepared->call.m, n = prepared->call.n;
  PyObject* result = nullptr;
  switch (prepared->framework) {
    case Framework::torch:
      result = frontends::torch::empty(m, n, prepared->like, &made);
      break;
    case Framework::numpy:
      result = frontends::numpy::empty(m, n, a, &made);
      break;
    case Framework::cupy:
      result = frontends::cupy::empty(m, n, a, &made);
      break;
    case Framework::none:
      break;
  }
  if (result == nullptr) return nullptr;
  Matrix matrix;
  const bool fits = made.shape[0] == m && made.shape[1] == n && made.dtype == prepared->call.dtype &&
                    made.device == prepared->device && as_matrix(made, &matrix) && !matrix.transposed;
  if (!fits) {
    Py_DECREF(result);
    PyErr_SetString(PyExc_RuntimeError,
                    "the framework's allocator answered with another array than asked for");
    return nullptr;
  }
  prepared->operands.c = made.address;
  prepared->operands.ldc = matrix.ld;
  return result;
}

void run_cpu(CpuGemmFn kernel, const Prepared& prepared) {
  const GemmOperands& g = prepared.operands;
  auto run = [&] {
    kernel(reinterpret_cast<const void*>(g.a), reinterpret_cast<const void*>(g.b),
           reinterpret_cast<void*>(g.c), g.m, g.n, g.k, g.lda, g.ldb, g.ldc,
           static_cast<int>(prepared.call.layout));
  };
  if (uint64_t{g.m} * g.n * g.k < kReleaseGilMacs) {
    run();
  } else {
    py::gil_scoped_release release;
    run();
  }
}

// CuPy allocates on the current device and its streams belong to it, so only that device is served here.
bool is_current_for_cupy(int device) {
  const driver::Api* api = driver::api();
  driver::CUcontext current = nullptr;
  if (api == nullptr || api->cuCtxGetCurrent(&current) != driver::kSuccess) return false;
  return current == nullptr ? device == 0 : current == driver::primary_context(device);
}

std::string with_consequence(const std::string& text, CudaKernel::Result result) {
  return text + (result == CudaKernel::Result::unusable
                     ? "; such products run on the vendor's library"
                     : "; this product runs on the vendor's library, the next one tries again");
}

// Everything that can send a CUDA call away, before an output exists. `stream` is set on Reason::none.
Reason ready_cuda(CudaKernel* kernel, const Prepared& prepared, void** stream, std::string* warning) {
  using Result = CudaKernel::Result;
  if (prepared.framework == Framework::cupy && !is_current_for_cupy(prepared.device)) {
    return Reason::other_device_current;
  }
  const bool known = prepared.framework == Framework::torch
                         ? frontends::torch::current_stream(prepared.device, stream)
                         : frontends::cupy::current_stream(stream);
  if (!known) return Reason::no_driver;
  if (!kernel->needs_load(prepared.device)) {
    return kernel->usable(prepared.device) ? Reason::none : Reason::kernel_unusable;
  }
  std::string text;
  bool first_time = false;
  Result result;
  {
    py::gil_scoped_release release;
    result = kernel->load(prepared.device, *stream, &text, &first_time);
  }
  if (first_time) *warning = with_consequence(text, result);
  if (result == Result::ok) return Reason::none;
  return result == Result::unusable ? Reason::kernel_unusable : Reason::capture;
}

bool warn(const std::string& message) {
  PyObject* errors = PyImport_ImportModule("ktlib.errors");
  PyObject* category = errors == nullptr ? nullptr : PyObject_GetAttrString(errors, "KtlibWarning");
  Py_XDECREF(errors);
  if (category == nullptr) return false;
  const bool fine = PyErr_WarnEx(category, message.c_str(), 1) == 0;
  Py_DECREF(category);
  return fine;
}

PyObject* leave(PyObject* a, PyObject* b, PyObject* out, Reason reason) {
  if (fallback == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "ktlib._core has no fallback; import ktlib instead of ktlib._core");
    return nullptr;
  }
  PyObject* arguments[5] = {nullptr, a, b, out != nullptr ? out : Py_None,
                            reason_strings[static_cast<int>(reason)]};
  return PyObject_Vectorcall(fallback, arguments + 1, 4 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

// For operands that are known to go together: straight to the library's matmul, with torch kept from reducing
// in half precision on a GPU. NumPy's own half product accumulates in half precision; the Python path has
// another.
PyObject* leave_prepared(PyObject* a, PyObject* b, PyObject* out, const Prepared& prepared, Reason reason) {
  PyObject* vendor = nullptr;
  const bool half = prepared.call.dtype != Dtype::fp32;
  switch (prepared.framework) {
    case Framework::torch:
      vendor = frontends::torch::vendor_matmul();
      break;
    case Framework::numpy:
      if (!half) vendor = frontends::numpy::vendor_matmul();
      break;
    case Framework::cupy:
      vendor = frontends::cupy::vendor_matmul();
      break;
    case Framework::none:
      break;
  }
  if (vendor == nullptr) return leave(a, b, out, reason);
  const Dtype dtype = prepared.call.dtype;
  const bool guarded =
      half && prepared.framework == Framework::torch && prepared.device_kind == DeviceKind::cuda;
  if (guarded && !frontends::torch::enter_fp32_reduction(dtype)) return nullptr;
  PyObject* arguments[4] = {nullptr, a, b, out};
  PyObject* result = PyObject_Vectorcall(vendor, arguments + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET,
                                         out != nullptr ? out_names : nullptr);
  if (guarded) frontends::torch::leave_fp32_reduction(dtype);
  return result;
}

PyObject* run(PyObject* a, PyObject* b, PyObject* out) {
  const Registry* registry = Registry::current();
  if (registry == nullptr) {
    if (loader != nullptr) {
      PyObject* loaded = PyObject_CallNoArgs(loader);
      if (loaded == nullptr) return nullptr;
      Py_DECREF(loaded);
    }
    registry = Registry::current();
  }
  if (!enabled.load(std::memory_order_relaxed)) return leave(a, b, out, Reason::disabled);
  Prepared prepared;
  Reason reason = prepare(a, b, out, &prepared);
  if (reason != Reason::none) return leave(a, b, out, reason);
  if (prepared.device_kind == DeviceKind::cuda && driver::forked()) {
    PyErr_SetString(PyExc_RuntimeError, ("ktlib: " + driver::status()).c_str());
    return nullptr;
  }
  if (registry == nullptr) return leave_prepared(a, b, out, prepared, Reason::no_database);
  const Memo memo = find_memo(*registry, prepared);
  if (memo.reason != Reason::none) return leave_prepared(a, b, out, prepared, memo.reason);

  void* stream = nullptr;
  if (memo.slot->cuda != nullptr) {
    std::string warning;
    reason = ready_cuda(memo.slot->cuda.get(), prepared, &stream, &warning);
    if (!warning.empty() && !warn(warning)) return nullptr;
    if (reason != Reason::none) return leave_prepared(a, b, out, prepared, reason);
  }
  PyObject* result = out;
  if (out == nullptr) {
    result = make_output(a, &prepared);
    if (result == nullptr) return nullptr;
  } else if (prepared.framework == Framework::torch && !frontends::torch::count_write(out)) {
    return nullptr;
  }
  if (memo.slot->cuda == nullptr) {
    run_cpu(memo.slot->cpu, prepared);
    return out != nullptr ? Py_NewRef(out) : result;
  }
  std::string text;
  bool first_time = false;
  const CudaKernel::Result launched =
      memo.slot->cuda->launch(prepared.operands, memo.group_m, prepared.device, stream, &text, &first_time);
  if (launched == CudaKernel::Result::ok) return out != nullptr ? Py_NewRef(out) : result;
  if (out == nullptr) Py_DECREF(result);
  if (first_time && !warn(with_consequence(text, launched))) return nullptr;
  return leave_prepared(a, b, out, prepared, Reason::kernel_unusable);
}

bool parse_out(PyObject* const* arguments, Py_ssize_t positional, PyObject* names, PyObject** out) {
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  if (positional != 2) {
    PyErr_Format(PyExc_TypeError,
                 "matmul takes two arrays, got %zd; call matmul(a, b) or matmul(a, b, out=c)", positional);
    return false;
  }
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    if (name != out_name && PyUnicode_Compare(name, out_name) != 0) {
      PyErr_Format(PyExc_TypeError, "matmul has no argument %R (accepted: out)", name);
      return false;
    }
    PyObject* value = arguments[positional + i];
    *out = value == Py_None ? nullptr : value;
  }
  return true;
}

PyObject* matmul(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  PyObject* out = nullptr;
  if (!parse_out(arguments, PyVectorcall_NARGS(static_cast<size_t>(count)), names, &out)) return nullptr;
  try {
    return run(arguments[0], arguments[1], out);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

constexpr const char* kMatmulDoc =
    "matmul(a, b, /, *, out=None)\n--\n\n"
    "Matrix product of two arrays of one library (torch, CuPy or NumPy), with torch.matmul's shapes.\n\n"
    "Runs the kernel that the tuning database names for the operands' shape, layout, dtype and device,\n"
    "with fp32 accumulation, on the library's current stream; the library's own product where no kernel\n"
    "is better. explain(a, b) says which and why.\n\n"
    "Args:\n"
    "    a: Left operand.\n"
    "    b: Right operand, of the same library, dtype and device.\n"
    "    out: Array of the result's shape and dtype to write into; it must not overlap an operand.\n\n"
    "Returns:\n"
    "    A new array of the operands' library and dtype, or `out`.\n\n"
    "Raises:\n"
    "    TypeError: Operands of different libraries or dtypes, or of a kind that is not accepted.\n"
    "    ValueError: Shapes or devices that do not go together, or an unusable `out`.";

PyMethodDef matmul_method = {"matmul", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(matmul)),
                             METH_FASTCALL | METH_KEYWORDS, kMatmulDoc};

Dtype half_dtype(const std::string& name) {
  KT_CHECK_ARG(name == "fp16" || name == "bf16", "fp32 reduction: dtype '", name, "' is not fp16 or bf16");
  return name == "bf16" ? Dtype::bf16 : Dtype::fp16;
}

void set_hook(PyObject** hook, const py::object& function) {
  PyObject* previous = *hook;
  *hook = function.is_none() ? nullptr : function.inc_ref().ptr();
  Py_XDECREF(previous);
}

}  // namespace

void bind_matmul(py::module_& module) {
  out_name = PyUnicode_InternFromString("out");
  out_names = PyTuple_Pack(1, out_name);
  for (int i = 0; i < static_cast<int>(Reason::kCount); ++i) {
    reason_strings[i] = PyUnicode_InternFromString(frontends::reason_text(static_cast<Reason>(i)));
  }
  PyObject* name = PyUnicode_InternFromString("ktlib._core");
  PyObject* function = PyCFunction_NewEx(&matmul_method, nullptr, name);
  Py_XDECREF(name);
  if (function == nullptr) throw py::error_already_set();
  module.add_object("matmul", py::reinterpret_steal<py::object>(function));

  module.def("set_fallback", [](const py::object& function) { set_hook(&fallback, function); });
  module.def("set_loader", [](const py::object& function) { set_hook(&loader, function); });
  module.def("set_enabled", [](bool value) { enabled.store(value, std::memory_order_relaxed); });
  module.def("numpy_reads_directly", &frontends::numpy::reads_directly);
  module.def("torch_flags_calibrated", &frontends::torch::flags_calibrated);
  module.def("torch_modes_direct", &frontends::torch::modes_direct);
  module.def("enter_fp32_reduction", [](const std::string& dtype) {
    if (!frontends::torch::enter_fp32_reduction(half_dtype(dtype))) throw py::error_already_set();
  });
  module.def("leave_fp32_reduction",
             [](const std::string& dtype) { frontends::torch::leave_fp32_reduction(half_dtype(dtype)); });
  const auto texts = [](std::initializer_list<Reason> reasons) {
    py::list result;
    for (const Reason one : reasons) result.append(py::handle(reason_strings[static_cast<int>(one)]));
    return result;
  };
  py::list plain = texts({Reason::kernel_unusable});
  for (int i = 1; i <= static_cast<int>(Reason::last_plain); ++i) plain.append(py::handle(reason_strings[i]));
  module.add_object("PLAIN_REASONS", py::tuple(plain));
  module.add_object("SEEN_BY_TORCH", py::tuple(texts({Reason::function_mode, Reason::tracing})));
  module.add_object("NOT_MATRICES", texts({Reason::not_matrices})[0]);
  bind_dispatch(module, enabled);
}

}  // namespace ktlib
