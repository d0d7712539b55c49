// The extension module: every part binds its own names.
#include <pybind11/pybind11.h>

#include "launch/bind_driver.hpp"
#include "launch/matmul.hpp"

namespace ktlib {
void bind_pack(pybind11::module_& module);
void bind_cpu(pybind11::module_& module);
}  // namespace ktlib

PYBIND11_MODULE(_core, module) {
  module.doc() = "Kernels, packs, selection and launch. Use it through ktlib.";
  ktlib::bind_driver(module);
  ktlib::bind_pack(module);
  ktlib::bind_cpu(module);
  ktlib::bind_matmul(module);
}
