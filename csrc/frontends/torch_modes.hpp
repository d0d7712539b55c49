// States of a thread in which torch.matmul is not what it seems: torch.autocast picks the result's dtype;
// dispatch modes (fake tensors, tracers, counters), function modes and torch.jit.trace have to see every
// operation. Such calls are torch's.
#pragma once

#include <Python.h>

#include <memory>

#include "common/problem.hpp"

namespace ktlib::frontends {

// Asks torch's own C++ functions, where the loaded torch has them and they agree with its Python functions
// in every state; else those, which cost about as much as the rest of a small product.
class TorchModes {
 public:
  // Never raises. Keeps `module` (torch) and this thread's states as they are. May be called again.
  void calibrate(PyObject* module);
  bool direct() const {
    return autocast_ != nullptr && any_mode_ != nullptr && any_function_mode_ != nullptr &&
           tracing_ != nullptr;
  }

  // For operands on such a device.
  bool autocast(DeviceKind kind) const {
    return autocast_ != nullptr ? autocast_(kind == DeviceKind::cuda ? kCuda : kCpu) : ask_autocast(kind);
  }
  bool dispatch_mode() const { return any_mode_ != nullptr ? any_mode_(false) : ask(dispatch_stack_length_); }
  // Default devices are function modes too; a product is nothing to them.
  bool function_mode() const {
    return (any_function_mode_ != nullptr ? any_function_mode_() : ask(is_function_mode_enabled_)) &&
           !only_default_devices();
  }
  bool tracing() const { return tracing_ != nullptr ? tracing_() != nullptr : ask(is_tracing_); }

 private:
  using Autocast = bool (*)(int8_t);  // at::autocast::is_autocast_enabled(c10::DeviceType)
  using AnyMode = bool (*)(bool);     // c10::impl::TorchDispatchModeTLS::any_modes_set(bool skip_infra_modes)
  using AnyFunctionMode = bool (*)();                  // at::impl::torch_function_mode_enabled()
  using Tracing = const std::shared_ptr<void>& (*)();  // torch::jit::tracer::getTracingState()
  static constexpr int8_t kCpu = 0, kCuda = 1;

  // A Python error counts as on: torch then decides.
  bool ask_autocast(DeviceKind kind) const;
  static bool ask(PyObject* function);
  bool only_default_devices() const;

  Autocast autocast_ = nullptr;
  AnyMode any_mode_ = nullptr;
  AnyFunctionMode any_function_mode_ = nullptr;
  Tracing tracing_ = nullptr;
  PyObject* is_autocast_enabled_ = nullptr;
  PyObject* dispatch_stack_length_ = nullptr;
  PyObject* is_function_mode_enabled_ = nullptr;
  PyObject* function_stack_length_ = nullptr;
  PyObject* function_stack_at_ = nullptr;
  PyObject* default_device_type_ = nullptr;
  PyObject* is_tracing_ = nullptr;
  PyObject* names_[2] = {};  // "cpu", "cuda"
};

}  // namespace ktlib::frontends
