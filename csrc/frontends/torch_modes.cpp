#include "frontends/torch_modes.hpp"

#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <string>

namespace py = pybind11;

namespace ktlib::frontends {
namespace {

constexpr const char* kAutocastSymbol = "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE";
constexpr const char* kAnyModeSymbol = "_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb";
constexpr const char* kAnyFunctionModeSymbol = "_ZN2at4impl27torch_function_mode_enabledEv";
constexpr const char* kTracingSymbol = "_ZN5torch3jit6tracer15getTracingStateEv";
constexpr const char* kNames[] = {"cpu", "cuda"};

// torch's libraries are not in the global scope; torch._C depends on those that have the functions.
void* find_symbol(const py::module_& torch, const char* name) {
  const auto path = torch.attr("_C").attr("__file__").cast<std::string>();
  void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  void* symbol = dlsym(library, name);
  dlclose(library);  // torch itself keeps it
  return symbol;
}

// Puts back what autocast was in this thread.
class AutocastKeeper {
 public:
  AutocastKeeper(const py::module_& torch, const char* name)
      : torch_(torch), name_(name), before_(torch.attr("is_autocast_enabled")(name)) {}
  ~AutocastKeeper() {
    try {
      set(before_);
    } catch (const py::error_already_set&) {  // it has been set before, so it can be
    }
  }
  void set(const py::object& value) const { torch_.attr("set_autocast_enabled")(name_, value); }

 private:
  const py::module_& torch_;
  const char* name_;
  py::object before_;
};

// Keeps what an earlier calibration found.
void find(PyObject** found, const py::object& object, const char* name) {
  if (*found == nullptr && py::hasattr(object, name)) *found = py::object(object.attr(name)).release().ptr();
}

// Records a trace of nothing and runs `inside` meanwhile.
void trace(const py::module_& torch, const std::function<void()>& inside) {
  const py::object argument = torch.attr("ones")(1, py::arg("device") = "cpu");
  const py::cpp_function recorded([&](const py::object& value) {
    inside();
    return value;
  });
  torch.attr("_C").attr("_create_graph_by_tracing")(recorded, py::make_tuple(argument),
                                                    py::cpp_function([](const py::object&) { return ""; }),
                                                    false, false, py::none(), py::make_tuple("value"));
}

}  // namespace

void TorchModes::calibrate(PyObject* module) {
  try {
    const auto torch = py::reinterpret_borrow<py::module_>(module);
    const py::object native = torch.attr("_C");
    find(&is_autocast_enabled_, torch, "is_autocast_enabled");
    find(&dispatch_stack_length_, native, "_len_torch_dispatch_stack");
    find(&is_function_mode_enabled_, native, "_is_torch_function_mode_enabled");
    find(&function_stack_length_, native, "_len_torch_function_stack");
    find(&function_stack_at_, native, "_get_function_stack_at");
    find(&default_device_type_, py::module_::import("torch.utils._device"), "DeviceContext");
    find(&is_tracing_, native, "_is_tracing");
    for (int i = 0; i < 2; ++i) {
      if (names_[i] == nullptr) names_[i] = py::str(kNames[i]).release().ptr();
    }

    const auto autocast = reinterpret_cast<Autocast>(find_symbol(torch, kAutocastSymbol));
    bool agrees = autocast != nullptr;
    for (int state = 0; agrees && state < 4; ++state) {
      const bool on_cpu = (state & 1) != 0, on_cuda = (state & 2) != 0;
      const AutocastKeeper cpu(torch, kNames[0]), cuda(torch, kNames[1]);
      cpu.set(py::bool_(on_cpu));
      cuda.set(py::bool_(on_cuda));
      agrees = autocast(kCpu) == on_cpu && autocast(kCuda) == on_cuda &&
               ask_autocast(DeviceKind::cpu) == on_cpu && ask_autocast(DeviceKind::cuda) == on_cuda;
    }
    if (agrees) autocast_ = autocast;

    const auto any_mode = reinterpret_cast<AnyMode>(find_symbol(torch, kAnyModeSymbol));
    if (any_mode != nullptr && any_mode(false) == ask(dispatch_stack_length_)) {
      const py::object mode = py::module_::import("torch.utils._python_dispatch").attr("TorchDispatchMode")();
      mode.attr("__enter__")();
      agrees = any_mode(false) && ask(dispatch_stack_length_);
      mode.attr("__exit__")(py::none(), py::none(), py::none());
      if (agrees && any_mode(false) == ask(dispatch_stack_length_)) any_mode_ = any_mode;
    }

    const auto function_mode = reinterpret_cast<AnyFunctionMode>(find_symbol(torch, kAnyFunctionModeSymbol));
    if (function_mode != nullptr && function_mode() == ask(is_function_mode_enabled_)) {
      const py::object mode = py::module_::import("torch.overrides").attr("BaseTorchFunctionMode")();
      mode.attr("__enter__")();
      agrees = function_mode() && ask(is_function_mode_enabled_);
      mode.attr("__exit__")(py::none(), py::none(), py::none());
      if (agrees && function_mode() == ask(is_function_mode_enabled_)) any_function_mode_ = function_mode;
    }

    const auto tracing = reinterpret_cast<Tracing>(find_symbol(torch, kTracingSymbol));
    if (tracing == nullptr || tracing() != nullptr || ask(is_tracing_)) return;
    agrees = false;
    trace(torch, [&] { agrees = tracing() != nullptr && ask(is_tracing_); });
    if (agrees && tracing() == nullptr && !ask(is_tracing_)) tracing_ = tracing;
  } catch (const std::exception&) {  // torch lacks something used here: its Python functions decide
  }
}

bool TorchModes::ask_autocast(DeviceKind kind) const {
  if (is_autocast_enabled_ == nullptr) return true;
  PyObject* answer = PyObject_CallOneArg(is_autocast_enabled_, names_[kind == DeviceKind::cuda ? 1 : 0]);
  if (answer == nullptr) PyErr_Clear();
  const bool on = answer != Py_False;
  Py_XDECREF(answer);
  return on;
}

bool TorchModes::ask(PyObject* function) {
  if (function == nullptr) return true;
  PyObject* answer = PyObject_CallNoArgs(function);
  const bool on = answer == nullptr || PyObject_IsTrue(answer) != 0;
  if (answer == nullptr) PyErr_Clear();
  Py_XDECREF(answer);
  return on;
}

bool TorchModes::only_default_devices() const {
  if (function_stack_length_ == nullptr || function_stack_at_ == nullptr) return false;
  PyObject* length = PyObject_CallNoArgs(function_stack_length_);
  const long count = length == nullptr ? -1 : PyLong_AsLong(length);
  Py_XDECREF(length);
  bool only = count > 0;
  for (long i = 0; only && i < count; ++i) {
    PyObject* mode = PyObject_CallFunction(function_stack_at_, "l", i);
    only = mode != nullptr && reinterpret_cast<PyObject*>(Py_TYPE(mode)) == default_device_type_;
    Py_XDECREF(mode);
  }
  PyErr_Clear();
  return only;
}

}  // namespace ktlib::frontends
