// A Choice as Python sees it; used by _core.explain and by _core.find_choice.
#pragma once

#include <pybind11/pybind11.h>

#include "dispatch/dispatch.hpp"

namespace ktlib {

// The call that a mapping describes: m, n, k, layout and dtype, and optionally batch, accumulate, epilogue,
// align and align_ab; `device` is let pass. Throws std::invalid_argument naming the field.
Call call_from_dict(const pybind11::dict& fields);

// ktlib.problem.Choice.to_dict(): kernel, tier, reason, database, launch, latency_us, vendor_us. `sm_count`
// is the device's, for the grid of persistent kernels.
pybind11::dict choice_to_dict(const Index& index, const Call& call, const Choice& choice, uint32_t sm_count);

// A file-system path, exactly: str, bytes or os.PathLike to bytes, and back.
std::string path_bytes(const pybind11::object& path);
pybind11::object path_text(const std::string& path);

}  // namespace ktlib
