// The near rule: among tuned problems of one class, the one with the least |log2 m/m'| + |log2 n/n'| + |log2
// k/k'|, no single ratio above two, whose kernel can serve the call. Built once, then read without
// allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/problem.hpp"
#include "pack/format.hpp"

namespace ktlib {

inline constexpr uint32_t kNone = 0xFFFFFFFF;

// A tuned problem with what the hot path needs of it; `kernel` is null where the vendor won.
struct Tuned {
  const pack::EntryRecord* entry;
  const pack::KernelRecord* kernel;
  uint32_t pack;
};

// Whether the kernel can run the call at all; that dtype and layout agree follows from the class.
inline bool serves(const pack::KernelRecord& kernel, const Call& call) noexcept {
  return kernel.min_align_bytes <= call.align_ab && call.k % kernel.k_multiple == 0;
}

// The best so far of a search: an index in the list of tuned problems, and the first one within range whose
// kernel cannot serve the call.
struct Near {
  static constexpr int32_t kFar = std::numeric_limits<int32_t>::max();
  int32_t distance = kFar;
  uint32_t tuned = kNone, unsuited = kNone;
};

class NearTable {
 public:
  void add(uint32_t tuned_index) { tuned_.push_back(tuned_index); }
  void build(const std::vector<Tuned>& tuned);
  // Improves `near`. Of two equally near the lower index wins: the earlier pack, then the earlier entry.
  void find(const std::vector<Tuned>& tuned, const Call& call, Near* near) const noexcept;

 private:
  struct Point;
  static constexpr size_t kBlock = 16;

  int32_t block_distances(size_t at, const Point& asked, int32_t (&distance)[kBlock]) const noexcept;
  void look_at_block(size_t at, const Point& asked, const std::vector<Tuned>& tuned, const Call& call,
                     Near* near) const noexcept;

  // Sorted by m, so that a factor of two in m is a range; padded to whole blocks.
  std::vector<int32_t> log_m_, log_n_, log_k_;
  std::vector<uint32_t> tuned_;
};

}  // namespace ktlib
