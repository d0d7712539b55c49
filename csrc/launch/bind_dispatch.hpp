// Python's view of the packs and of selection.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>

namespace ktlib {

// Adds set_packs, packs, explain, explain_call and preload. `enabled` is matmul's switch.
void bind_dispatch(pybind11::module_& module, const std::atomic<bool>& enabled);

}  // namespace ktlib
