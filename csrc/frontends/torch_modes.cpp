#include "frontends/torch_modes.hpp"

#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <string>

namespace py = pybind11;

namespace ktlib::frontends {
namespace {

constexpr const char* kAutocastSymbol = "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE";
constexpr const char* kAnyModeSymbol = "_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb";
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

PyObject* attribute(const py::object& object, const char* name) {
  return py::getattr(object, name, py::none()).release().ptr();
}

}  // namespace

void TorchModes::calibrate(PyObject* module) {
  try {
    const auto torch = py::reinterpret_borrow<py::module_>(module);
    is_autocast_enabled_ = attribute(torch, "is_autocast_enabled");
    dispatch_stack_length_ = attribute(torch.attr("_C"), "_len_torch_dispatch_stack");
    for (int i = 0; i < 2; ++i) names_[i] = py::str(kNames[i]).release().ptr();

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
    if (any_mode == nullptr || any_mode(false) != ask_dispatch_mode()) return;
    const py::object mode = py::module_::import("torch.utils._python_dispatch").attr("TorchDispatchMode")();
    mode.attr("__enter__")();
    agrees = any_mode(false) && ask_dispatch_mode();
    mode.attr("__exit__")(py::none(), py::none(), py::none());
    if (agrees && any_mode(false) == ask_dispatch_mode()) any_mode_ = any_mode;
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

bool TorchModes::ask_dispatch_mode() const {
  if (dispatch_stack_length_ == nullptr) return true;
  PyObject* answer = PyObject_CallNoArgs(dispatch_stack_length_);
  const bool on = answer == nullptr || PyObject_IsTrue(answer) != 0;
  if (answer == nullptr) PyErr_Clear();
  Py_XDECREF(answer);
  return on;
}

}  // namespace ktlib::frontends
