// Two states of a thread in which torch.matmul is not what it seems: torch.autocast picks the result's dtype,
// and a dispatch mode (fake tensors, tracers, counters) has to see every operation. Such calls are torch's.
#pragma once

#include <Python.h>

#include "common/problem.hpp"

namespace ktlib::frontends {

// Asks torch's own C++ functions, where the loaded torch has them and they agree with its Python functions
// in every state; else those, which cost about as much as the rest of a small product.
class TorchModes {
 public:
  // Never raises. Keeps `module` (torch) and this thread's states as they are.
  void calibrate(PyObject* module);
  bool direct() const { return autocast_ != nullptr && any_mode_ != nullptr; }

  // For operands on such a device.
  bool autocast(DeviceKind kind) const {
    return autocast_ != nullptr ? autocast_(kind == DeviceKind::cuda ? kCuda : kCpu) : ask_autocast(kind);
  }
  bool dispatch_mode() const { return any_mode_ != nullptr ? any_mode_(false) : ask_dispatch_mode(); }

 private:
  using Autocast = bool (*)(int8_t);  // at::autocast::is_autocast_enabled(c10::DeviceType)
  using AnyMode = bool (*)(bool);     // c10::impl::TorchDispatchModeTLS::any_modes_set(bool skip_infra_modes)
  static constexpr int8_t kCpu = 0, kCuda = 1;

  // A Python error counts as on: torch then decides.
  bool ask_autocast(DeviceKind kind) const;
  bool ask_dispatch_mode() const;

  Autocast autocast_ = nullptr;
  AnyMode any_mode_ = nullptr;
  PyObject* is_autocast_enabled_ = nullptr;
  PyObject* dispatch_stack_length_ = nullptr;
  PyObject* names_[2] = {};  // "cpu", "cuda"
};

}  // namespace ktlib::frontends
