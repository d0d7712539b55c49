#include "dispatch/near.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace ktlib {
namespace {

// log2 in fixed point: doubling an extent adds exactly kOctave, so a ratio of two is met exactly and equal
// distances along different axes are equal numbers, which floats would not give.
constexpr int32_t kOctave = 1 << 20;
int32_t fixed_log2(uint32_t extent) {
  return static_cast<int32_t>(std::lround(std::log2(static_cast<double>(extent)) * kOctave));
}

// GCC and Clang vectors, because plain loops stay scalar at -O2: a search that finds nothing among 4,000 took
// 7.5 us so, 2.8 with these (2-core x86-64, GCC 12).
constexpr size_t kLanes = 4;
typedef int32_t Lanes __attribute__((vector_size(16)));

Lanes broadcast(int32_t value) { return Lanes{value, value, value, value}; }

// |from[i] - to| in each lane.
Lanes gap(const int32_t* from, Lanes to) {
  Lanes difference;
  std::memcpy(&difference, from, sizeof difference);
  difference -= to;
  const Lanes sign = difference >> 31;
  return (difference ^ sign) - sign;
}

}  // namespace

// The logarithms of a call's extents, each in all lanes.
struct NearTable::Point {
  Lanes log_m, log_n, log_k;
};

void NearTable::build(const std::vector<Tuned>& tuned) {
  if (tuned_.empty()) return;
  std::stable_sort(tuned_.begin(), tuned_.end(),
                   [&](uint32_t a, uint32_t b) { return tuned[a].entry->m < tuned[b].entry->m; });
  for (const uint32_t i : tuned_) {
    log_m_.push_back(fixed_log2(tuned[i].entry->m));
    log_n_.push_back(fixed_log2(tuned[i].entry->n));
    log_k_.push_back(fixed_log2(tuned[i].entry->k));
  }
  // The padding lies more than an octave above every extent, so it is never within a factor of two.
  for (auto* logs : {&log_m_, &log_n_, &log_k_}) logs->resize(tuned_.size() + kBlock, 64 * kOctave);
}

// Distances of one block, kFar where a ratio exceeds two; returns the least.
int32_t NearTable::block_distances(size_t at, const Point& asked,
                                   int32_t (&distance)[kBlock]) const noexcept {
  Lanes least = broadcast(Near::kFar);
  for (size_t j = 0; j < kBlock; j += kLanes) {
    const Lanes dm = gap(log_m_.data() + at + j, asked.log_m);
    const Lanes dn = gap(log_n_.data() + at + j, asked.log_n);
    const Lanes dk = gap(log_k_.data() + at + j, asked.log_k);
    const Lanes near = (dm <= kOctave) & (dn <= kOctave) & (dk <= kOctave);
    const Lanes lanes = ((dm + dn + dk) & near) | (Near::kFar & ~near);
    std::memcpy(distance + j, &lanes, sizeof lanes);
    const Lanes less = lanes < least;
    least = (lanes & less) | (least & ~less);
  }
  return std::min(std::min(least[0], least[1]), std::min(least[2], least[3]));
}

void NearTable::look_at_block(size_t at, const Point& asked, const std::vector<Tuned>& tuned,
                              const Call& call, Near* near) const noexcept {
  int32_t distance[kBlock];
  const int32_t least = block_distances(at, asked, distance);
  if (least == Near::kFar || least > near->distance) return;
  for (size_t j = 0; j < kBlock; ++j) {
    if (distance[j] == Near::kFar || distance[j] > near->distance) continue;
    const uint32_t index = tuned_[at + j];
    if (distance[j] == near->distance && index > near->tuned) continue;
    const pack::KernelRecord* kernel = tuned[index].kernel;
    if (kernel != nullptr && !serves(*kernel, call)) {
      if (near->unsuited == kNone) near->unsuited = index;
      continue;
    }
    near->distance = distance[j];
    near->tuned = index;
  }
}

void NearTable::find(const std::vector<Tuned>& tuned, const Call& call, Near* near) const noexcept {
  const size_t count = tuned_.size();
  if (count == 0) return;
  const int32_t log_m = fixed_log2(call.m);
  const Point asked{broadcast(log_m), broadcast(fixed_log2(call.n)), broadcast(fixed_log2(call.k))};
  // Outwards from the call's own m, both ways, until m alone is farther than the best or than a factor of
  // two.
  const auto limit = [near] { return std::min(near->distance, kOctave); };
  const auto begin = log_m_.begin(), end = begin + static_cast<ptrdiff_t>(count);
  const auto middle = static_cast<size_t>(std::lower_bound(begin, end, log_m) - begin);
  for (size_t at = middle; at < count && log_m_[at] - log_m <= limit(); at += kBlock)
    look_at_block(at, asked, tuned, call, near);
  // A block that begins below index 0 is moved up; seeing an entry twice changes nothing.
  for (size_t after = middle; after > 0 && log_m - log_m_[after - 1] <= limit();) {
    after = after > kBlock ? after - kBlock : 0;
    look_at_block(after, asked, tuned, call, near);
  }
}

}  // namespace ktlib
