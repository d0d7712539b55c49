// The hot entry `_core.matmul` and what configures it.
#pragma once

#include <pybind11/pybind11.h>

namespace ktlib {

// Adds matmul, set_fallback, set_loader, set_packs, packs, set_enabled, explain, explain_call and preload.
void bind_matmul(pybind11::module_& module);

}  // namespace ktlib
