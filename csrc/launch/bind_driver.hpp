// Python's view of the CUDA driver and of a single compiled kernel.
#pragma once

#include <pybind11/pybind11.h>

namespace ktlib {

// Adds cuda_status, cuda_device_count, cuda_device, set_libcuda and CudaKernel.
void bind_driver(pybind11::module_& module);

}  // namespace ktlib
