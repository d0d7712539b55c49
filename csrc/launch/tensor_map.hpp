// Tensor maps for the TMA unit, from a small cache per thread: encoding one costs more than the rest of a
// launch.
#pragma once

#include <cstdint>

#include "common/problem.hpp"
#include "driver/driver.hpp"

namespace ktlib {

// A matrix as stored: `inner` is the unit-stride extent. Everything an encoded map depends on.
struct TensorMapKey {
  uint64_t address;
  uint64_t inner, outer;  // elements
  uint64_t stride_bytes;
  uint32_t box_inner, box_outer;  // elements
  uint32_t swizzle_bytes;
  uint32_t dtype;  // Dtype

  bool operator==(const TensorMapKey& o) const {
    return address == o.address && inner == o.inner && outer == o.outer && stride_bytes == o.stride_bytes &&
           box_inner == o.box_inner && box_outer == o.box_outer && swizzle_bytes == o.swizzle_bytes &&
           dtype == o.dtype;
  }
};

// Writes the map to `out`; the driver's answer where it refuses to encode one.
driver::CUresult tensor_map(const driver::Api& api, const TensorMapKey& key, driver::CUtensorMap* out);

}  // namespace ktlib
