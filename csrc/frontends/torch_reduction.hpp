// torch's permission to reduce half-precision CUDA products in half precision, withdrawn while a call of ours
// is in torch.matmul. The switch belongs to the process: the first one in saves the user's value, the last
// one out puts it back. Everything here runs under the GIL, which torch.matmul itself gives up; hence the
// count.
#pragma once

#include "common/problem.hpp"

namespace ktlib::frontends::torch {

// Call leave once for each enter that returned true; false leaves a Python error set.
bool enter_fp32_reduction(Dtype dtype);

// Keeps a Python error that is set already.
void leave_fp32_reduction(Dtype dtype);

}  // namespace ktlib::frontends::torch
