// Which kernel a call gets: the only selection code. Pure: takes facts, allocates nothing, reads no file and
// no environment, takes no lock. An Index is immutable; a new one replaces it whole.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/problem.hpp"
#include "pack/format.hpp"
#include "pack/reader.hpp"

namespace ktlib {

// The device a call runs on. For a CPU, `arch` is the best level this machine runs and `cpu_archs` all it
// runs.
struct DeviceFacts {
  DeviceKind kind = DeviceKind::cpu;
  uint32_t cc_major = 0, cc_minor = 0, sm_count = 0;
  std::vector<std::string> cpu_archs;
};

// Why the vendor was chosen, as a number on the hot path and a sentence in explain().
enum class VendorReason : uint8_t {
  none = 0,       // a kernel was chosen
  no_database,    // no pack fits this device
  vendor_faster,  // the tuned entry says so
  not_tuned,      // no entry of this class is near enough
  misaligned,     // the entry's kernel needs more alignment than A and B have
  unsupported,    // no entry of this dtype, layout or epilogue at all
};

struct Choice {
  const pack::Pack* pack = nullptr;            // that decided; null when none fits
  const pack::KernelRecord* kernel = nullptr;  // null: the vendor
  const pack::EntryRecord* entry = nullptr;    // the tuned problem it comes from; null when none
  uint32_t kernel_index = 0;                   // of `kernel` in `pack`
  uint32_t pack_index = 0;                     // of `pack` in the Index
  Tier tier = Tier::vendor;
  VendorReason vendor_reason = VendorReason::no_database;
};

// Exact and near lookup over the packs that fit one device, first pack first.
class Index {
 public:
  // Packs that do not fit `device` are kept out; `rejected()` says why, one line each.
  Index(std::vector<std::shared_ptr<const pack::Pack>> packs, DeviceFacts device);
  ~Index();
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;

  // noexcept, no allocation: safe on any thread.
  Choice find(const Call& call) const noexcept;

  // The same answer with its reason as a sentence with the numbers in it.
  std::string explain(const Call& call, const Choice& choice) const;

  const std::vector<std::shared_ptr<const pack::Pack>>& packs() const;
  const std::vector<std::string>& rejected() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ktlib
