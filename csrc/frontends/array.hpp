// What every array library's operand becomes: an address, two extents, two strides. A reader either fills it
// or names the reason why this operand is for the Python path; it never raises and leaves no Python error
// set.
#pragma once

#include <Python.h>

#include <cstdint>

#include "common/problem.hpp"

namespace ktlib::frontends {

enum class Framework : uint8_t { none, torch, cupy, numpy };

// Why a call leaves the fast path. The text (reason_text) goes to the Python path and into explain(); the
// first group says that both operands are plain matrices of one kind, so the vendor may be called without
// more checks.
enum class Reason : uint8_t {
  none = 0,
  no_database,
  vendor_faster,
  not_tuned,
  misaligned,
  unsupported,
  last_plain = unsupported,
  disabled,
  other_types,
  not_matrices,
  dtype,
  devices_differ,
  shapes_differ,
  empty,
  strides,
  needs_grad,
  autocast,
  forward_tangent,
  dispatch_mode,
  function_mode,
  tracing,
  negative_bit,
  not_exportable,
  out,
  no_driver,
  kernel_unusable,
  capture,
  other_device_current,
  kCount,
};

const char* reason_text(Reason reason);

struct Array {
  uint64_t address;
  int64_t shape[2];
  int64_t strides[2];  // elements
  Dtype dtype;
  DeviceKind device_kind;
  int32_t device;
};

}  // namespace ktlib::frontends
