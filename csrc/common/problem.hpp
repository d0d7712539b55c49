// What a call asks for, as far as choosing a kernel depends on it. The numbers are those of
// ktlib/problem.py and of packs; tests/unit compares the three.
#pragma once

#include <cstdint>

namespace ktlib {

enum class Dtype : uint8_t { fp16 = 0, bf16 = 1, fp32 = 2 };
enum class Layout : uint8_t { nn = 0, nt = 1, tn = 2, tt = 3 };
enum class Accumulate : uint8_t { fp32 = 0, fp16 = 1 };
enum class Epilogue : uint8_t { none = 0 };
enum class Tier : uint8_t { exact = 0, near = 1, model = 2, vendor_algorithm = 3, vendor = 4 };
enum class DeviceKind : uint8_t { cuda = 1, cpu = 2 };

inline constexpr uint32_t kAnyLayout = 0xFF;

inline constexpr const char* kDtypeNames[] = {"fp16", "bf16", "fp32"};
inline constexpr const char* kLayoutNames[] = {"nn", "nt", "tn", "tt"};
inline constexpr const char* kAccumulateNames[] = {"fp32", "fp16"};
inline constexpr const char* kEpilogueNames[] = {"none"};
inline constexpr const char* kTierNames[] = {"exact", "near", "model", "vendor_algorithm", "vendor"};

inline uint32_t element_bytes(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

// One product C[m, n] = A[m, k] B[k, n]. `align` is Problem.align (A, B and C); `align_ab` is that of A and B
// alone, which is what a kernel's min_align_bytes is compared with. Both are bytes, at most 16.
struct Call {
  uint32_t m = 0, n = 0, k = 0, batch = 1;
  Layout layout = Layout::nn;
  Dtype dtype = Dtype::fp16;
  Accumulate accumulate = Accumulate::fp32;
  Epilogue epilogue = Epilogue::none;
  uint8_t align = 16, align_ab = 16;

  bool operator==(const Call& o) const {
    return m == o.m && n == o.n && k == o.k && batch == o.batch && layout == o.layout && dtype == o.dtype &&
           accumulate == o.accumulate && epilogue == o.epilogue && align == o.align && align_ab == o.align_ab;
  }
};

}  // namespace ktlib
