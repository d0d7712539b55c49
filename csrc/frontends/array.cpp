#include "frontends/array.hpp"

namespace ktlib::frontends {

const char* reason_text(Reason reason) {
  switch (reason) {
    case Reason::none:
      return "";
    case Reason::no_database:
      return "no database fits this device";
    case Reason::vendor_faster:
      return "the vendor was measured faster";
    case Reason::not_tuned:
      return "no tuned problem is near";
    case Reason::misaligned:
      return "the tuned kernel needs more alignment";
    case Reason::unsupported:
      return "no kernel has this dtype or layout";
    case Reason::disabled:
      return "kernels are switched off (KTLIB_DISABLE)";
    case Reason::other_types:
      return "the operands are not two plain arrays of one library";
    case Reason::not_matrices:
      return "the operands are not both two-dimensional";
    case Reason::dtype:
      return "no kernel takes these dtypes (have: fp16, bf16, fp32, both operands alike)";
    case Reason::devices_differ:
      return "the operands are on different devices";
    case Reason::shapes_differ:
      return "the operands' shapes do not match";
    case Reason::empty:
      return "an extent is zero, there is nothing to launch";
    case Reason::strides:
      return "an operand has no unit stride, or is expanded, reversed or larger than 2^31";
    case Reason::needs_grad:
      return "an operand requires a gradient";
    case Reason::autocast:
      return "torch.autocast is on, so torch picks the dtype";
    case Reason::forward_tangent:
      return "an operand may carry a forward-mode tangent";
    case Reason::function_mode:
      return "a torch function mode is on";
    case Reason::tracing:
      return "torch.jit.trace is recording";
    case Reason::dispatch_mode:
      return "a torch dispatch mode is on (fake tensors, a tracer or a counter)";
    case Reason::negative_bit:
      return "an operand is a lazily negated view";
    case Reason::not_exportable:
      return "an operand does not give out its memory (a wrapper or without data)";
    case Reason::out:
      return "out is not a row-major matrix of the result's kind apart from the operands";
    case Reason::no_driver:
      return "the CUDA driver cannot be used";
    case Reason::kernel_unusable:
      return "the chosen kernel cannot run on this device";
    case Reason::capture:
      return "the kernel could not be loaded now";
    case Reason::other_device_current:
      return "the operands are not on CuPy's current device";
    case Reason::kCount:
      break;
  }
  return "";
}

}  // namespace ktlib::frontends
