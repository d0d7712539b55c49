// Two derived tables over the packs that fit: a hash table for exact hits, and for each class (everything but
// m, n, k) a NearTable. Both are built once, in the constructor.
#include "dispatch/dispatch.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <tuple>

#include "common/check.hpp"
#include "dispatch/near.hpp"
#include "dispatch/text.hpp"

namespace ktlib {
namespace {

using pack::EntryRecord;
using pack::KernelRecord;
using pack::Pack;

// A class is everything but the extents. Alignment comes last, so that a class without it is class / kAligns.
constexpr uint32_t kLayouts = 4, kDtypes = 3, kAccumulates = 2, kEpilogues = 1, kAligns = 5;
constexpr uint32_t kKinds = kLayouts * kDtypes * kAccumulates * kEpilogues;
constexpr uint32_t kClasses = kKinds * kAligns;

uint32_t class_of(uint32_t layout, uint32_t dtype, uint32_t accumulate, uint32_t epilogue, uint32_t align) {
  const uint32_t log_align = align == 16 ? 4 : align == 8 ? 3 : align == 4 ? 2 : align == 2 ? 1 : 0;
  if (layout >= kLayouts || dtype >= kDtypes || accumulate >= kAccumulates || epilogue >= kEpilogues ||
      align != 1U << log_align)
    return kNone;
  return (((layout * kDtypes + dtype) * kAccumulates + accumulate) * kEpilogues + epilogue) * kAligns +
         log_align;
}

uint32_t class_of(const Call& call) {
  return class_of(static_cast<uint32_t>(call.layout), static_cast<uint32_t>(call.dtype),
                  static_cast<uint32_t>(call.accumulate), static_cast<uint32_t>(call.epilogue), call.align);
}

uint32_t class_of(const EntryRecord& entry) {
  return class_of(entry.layout, entry.dtype, entry.accumulate, entry.epilogue, entry.align);
}

uint64_t mix64(uint64_t x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

uint64_t hash_key(uint32_t m, uint32_t n, uint32_t k, uint32_t cls) {
  return mix64((uint64_t{m} << 32 | n) ^ mix64(uint64_t{k} << 32 | cls));
}

struct Slot {
  uint32_t m, n, k, cls, tuned;
};

}  // namespace

struct Index::Impl {
  std::vector<std::shared_ptr<const Pack>> packs;
  std::vector<bool> same_device;  // by pack: whether its entries may be exact
  std::vector<std::string> rejected;
  DeviceFacts device;
  std::vector<Tuned> tuned;  // pack by pack, in file order: the order that breaks ties
  std::vector<Slot> slots;
  NearTable near[2][kClasses];  // [0]: tuned on the same device; [1]: on another SM count
  bool known_kind[kKinds] = {};

  std::string misfit(const Pack& pack) const;
  void add_entries(uint32_t pack_index);
  void build_slots();
  void build_near();
  uint32_t find_exact(const Call& call, uint32_t cls) const noexcept;
  const EntryRecord* nearest_at_any_distance(const Call& call) const;
  Choice answer(uint32_t index, Tier tier) const noexcept;
  std::string device_text() const;
  std::string other_device_text(const Pack& pack) const;
};

std::string Index::Impl::device_text() const {
  if (device.kind == DeviceKind::cuda)
    return concat("compute capability ", device.cc_major, ".", device.cc_minor, " with ", device.sm_count,
                  " SMs");
  std::string text = "a CPU of";
  for (const std::string& arch : device.cpu_archs) text += " " + arch;
  return text;
}

// What the reason adds when the timings come from a device that only resembles this one.
std::string Index::Impl::other_device_text(const Pack& pack) const {
  const uint32_t sms = pack.header().sm_count;
  if (device.kind == DeviceKind::cuda)
    return sms == device.sm_count ? ""
                                  : concat("; tuned on ", sms, " SMs, this device has ", device.sm_count);
  const std::string& best = device.cpu_archs.front();  // not empty, or the pack would not fit
  return pack.arch() == best ? "" : concat("; tuned for ", pack.arch(), ", this CPU is ", best);
}

// Why the pack cannot be used on this device; empty when it can.
std::string Index::Impl::misfit(const Pack& pack) const {
  const pack::Header& header = pack.header();
  if (header.device_kind != static_cast<uint32_t>(device.kind))
    return concat("made for ", pack.profile(), ", this device is ", device_text());
  if (device.kind == DeviceKind::cuda) {
    if (header.cc_major == device.cc_major && header.cc_minor == device.cc_minor) return "";
    return concat("made for compute capability ", header.cc_major, ".", header.cc_minor, " (", pack.profile(),
                  "), this device is ", device_text());
  }
  const auto& archs = device.cpu_archs;
  if (std::find(archs.begin(), archs.end(), pack.arch()) != archs.end()) return "";
  return concat("made for ", pack.arch(), ", this device is ", device_text());
}

void Index::Impl::add_entries(uint32_t pack_index) {
  const Pack& pack = *packs[pack_index];
  for (const EntryRecord& entry : pack.entries()) {
    const KernelRecord* kernel =
        entry.kernel == pack::kVendorKernel ? nullptr : &pack.kernels()[entry.kernel];
    if (entry.batch == 1) tuned.push_back({&entry, kernel, pack_index});
  }
}

void Index::Impl::build_slots() {
  size_t capacity = 16;
  while (capacity < 2 * tuned.size()) capacity *= 2;
  slots.assign(capacity, Slot{0, 0, 0, 0, kNone});
  for (uint32_t i = 0; i < tuned.size(); ++i) {
    const EntryRecord& entry = *tuned[i].entry;
    if (!same_device[tuned[i].pack]) continue;
    const Slot slot{entry.m, entry.n, entry.k, class_of(entry), i};
    size_t at = hash_key(slot.m, slot.n, slot.k, slot.cls) & (capacity - 1);
    const auto is_other = [&](const Slot& s) {
      return s.m != slot.m || s.n != slot.n || s.k != slot.k || s.cls != slot.cls;
    };
    while (slots[at].tuned != kNone && is_other(slots[at])) at = (at + 1) & (capacity - 1);
    if (slots[at].tuned == kNone) slots[at] = slot;  // else an earlier pack has it, and wins
  }
}

void Index::Impl::build_near() {
  for (uint32_t i = 0; i < tuned.size(); ++i) {
    const uint32_t cls = class_of(*tuned[i].entry);
    known_kind[cls / kAligns] = true;
    near[same_device[tuned[i].pack] ? 0 : 1][cls].add(i);
  }
  for (auto& by_device : near) {
    for (NearTable& table : by_device) table.build(tuned);
  }
}

Index::Index(std::vector<std::shared_ptr<const Pack>> packs, DeviceFacts device) : impl_(new Impl) {
  impl_->device = std::move(device);
  for (auto& pack : packs) {
    KT_CHECK_ARG(pack != nullptr, "index: a pack is null");
    const std::string reason = impl_->misfit(*pack);
    if (!reason.empty()) {
      impl_->rejected.push_back(pack->path() + ": " + reason);
      continue;
    }
    impl_->same_device.push_back(pack->header().sm_count == impl_->device.sm_count ||
                                 impl_->device.kind == DeviceKind::cpu);
    impl_->packs.push_back(std::move(pack));
    impl_->add_entries(static_cast<uint32_t>(impl_->packs.size() - 1));
  }
  impl_->build_slots();
  impl_->build_near();
}

Index::~Index() = default;

const std::vector<std::shared_ptr<const Pack>>& Index::packs() const { return impl_->packs; }
const std::vector<std::string>& Index::rejected() const { return impl_->rejected; }

uint32_t Index::Impl::find_exact(const Call& call, uint32_t cls) const noexcept {
  const size_t mask = slots.size() - 1;
  for (size_t at = hash_key(call.m, call.n, call.k, cls) & mask;; at = (at + 1) & mask) {
    const Slot& slot = slots[at];
    if (slot.tuned == kNone) return kNone;
    if (slot.m == call.m && slot.n == call.n && slot.k == call.k && slot.cls == cls) return slot.tuned;
  }
}

Choice Index::Impl::answer(uint32_t index, Tier tier) const noexcept {
  const Tuned& found = tuned[index];
  Choice choice;
  choice.pack = packs[found.pack].get();
  choice.pack_index = found.pack;
  choice.entry = found.entry;
  choice.kernel = found.kernel;
  choice.kernel_index = found.kernel == nullptr ? 0 : found.entry->kernel;
  choice.tier = found.kernel == nullptr ? Tier::vendor : tier;
  choice.vendor_reason = found.kernel == nullptr ? VendorReason::vendor_faster : VendorReason::none;
  return choice;
}

Choice Index::find(const Call& call) const noexcept {
  const Impl& impl = *impl_;
  Choice vendor;
  if (impl.packs.empty()) return vendor;  // no_database
  const uint32_t cls = class_of(call);
  vendor.vendor_reason = VendorReason::unsupported;
  if (cls == kNone || call.batch != 1 || call.m == 0 || call.n == 0 || call.k == 0) return vendor;

  Near near;
  const uint32_t exact = impl.find_exact(call, cls);
  if (exact != kNone) {
    const KernelRecord* kernel = impl.tuned[exact].kernel;
    if (kernel == nullptr || serves(*kernel, call)) return impl.answer(exact, Tier::exact);
    near.unsuited = exact;
  }
  for (const auto& by_device : impl.near) {
    by_device[cls].find(impl.tuned, call, &near);
    if (near.tuned != kNone) return impl.answer(near.tuned, Tier::near);
  }
  if (near.unsuited != kNone) {
    const Tuned& unsuited = impl.tuned[near.unsuited];
    vendor.vendor_reason = VendorReason::misaligned;
    vendor.entry = unsuited.entry;
    vendor.pack_index = unsuited.pack;
    vendor.pack = impl.packs[vendor.pack_index].get();
  } else if (impl.known_kind[cls / kAligns]) {
    vendor.vendor_reason = VendorReason::not_tuned;
  }
  return vendor;
}

const EntryRecord* Index::Impl::nearest_at_any_distance(const Call& call) const {
  const EntryRecord* nearest = nullptr;
  double best = std::numeric_limits<double>::infinity();
  const auto gap = [](uint32_t a, uint32_t b) {
    return std::abs(std::log2(double(a)) - std::log2(double(b)));
  };
  for (const Tuned& candidate : tuned) {
    const EntryRecord& entry = *candidate.entry;
    if (class_of(entry) != class_of(call)) continue;
    const double distance = gap(entry.m, call.m) + gap(entry.n, call.n) + gap(entry.k, call.k);
    if (distance < best) best = distance, nearest = &entry;
  }
  return nearest;
}

namespace {

// Why a kernel that looks faster was not taken. The packer decided; its rule asks for more than the noise.
const char* refusal_text(const EntryRecord& entry) {
  if (entry.latency_us >= entry.vendor_us) return "; the vendor was faster";
  if (entry.vendor_us / entry.latency_us - 1.0 <= 2.0 * entry.noise)
    return "; the vendor was chosen because the gain is not more than twice the noise";
  return "; the vendor was chosen because the gain is too small or its measurement too noisy";
}

std::string numbers_text(const EntryRecord& entry, bool kernel_won) {
  if (!kernel_won && entry.latency_us == 0)
    return concat("none of ", entry.candidates, " candidates gave a right result, ",
                  microseconds(entry.vendor_us), " for the vendor");
  char noise[32];
  std::snprintf(noise, sizeof noise, "%.1f%%", entry.noise * 100.0);
  return concat(kernel_won ? "its kernel took " : "its best kernel took ", microseconds(entry.latency_us),
                " against ", microseconds(entry.vendor_us), " for the vendor, noise ", noise,
                kernel_won ? "" : refusal_text(entry));
}

// "nearest tuned problem 4096x4096x1024:nn:fp16 (m 4097 -> 4096, k 1000 -> 1024)", naming only the extents
// that differ.
std::string origin_text(const Call& call, const EntryRecord& entry) {
  std::string changes;
  for (const auto& [name, got, has] : {std::tuple("m", call.m, entry.m), std::tuple("n", call.n, entry.n),
                                       std::tuple("k", call.k, entry.k)}) {
    if (got != has) changes += concat(changes.empty() ? "" : ", ", name, " ", got, " -> ", has);
  }
  if (changes.empty()) return concat("tuned problem ", problem_text(entry));
  return concat("nearest tuned problem ", problem_text(entry), " (", changes, ")");
}

}  // namespace

std::string Index::explain(const Call& call, const Choice& choice) const {
  const Impl& impl = *impl_;
  if (choice.entry != nullptr && choice.pack != nullptr) {
    const std::string other_device = impl.other_device_text(*choice.pack);
    const std::string origin = origin_text(call, *choice.entry);
    if (choice.kernel != nullptr)
      return concat(origin, ": ", numbers_text(*choice.entry, true), other_device);
    if (choice.vendor_reason == VendorReason::vendor_faster)
      return concat(origin, ": ", numbers_text(*choice.entry, false), other_device);
    const KernelRecord& kernel = choice.pack->kernels()[choice.entry->kernel];
    return concat(origin, ": its kernel ", choice.pack->name(kernel), " needs A and B aligned to ",
                  kernel.min_align_bytes, " bytes and k a multiple of ", kernel.k_multiple, ", got ",
                  uint32_t{call.align_ab}, " bytes and k=", call.k);
  }
  if (choice.vendor_reason == VendorReason::no_database) {
    std::string text = concat("no database fits ", impl.device_text());
    if (impl.rejected.empty()) text += "; none is loaded";
    for (const std::string& line : impl.rejected) text += "; " + line;
    return text;
  }
  const bool empty = call.m == 0 || call.n == 0 || call.k == 0;
  if (empty || call.batch != 1)
    return concat("no kernel takes ", empty ? "an empty product" : "a batch", ", got m=", call.m,
                  " n=", call.n, " k=", call.k, " batch=", call.batch);
  const uint32_t cls = class_of(call);
  if (cls == kNone || choice.vendor_reason == VendorReason::unsupported) {
    if (cls == kNone) return concat("dtype, layout, epilogue or align (", int{call.align}, ") is unknown");
    return concat("nothing of ", name_of(kLayoutNames, call.layout), " ", name_of(kDtypeNames, call.dtype),
                  " accumulate ", name_of(kAccumulateNames, call.accumulate), " epilogue ",
                  name_of(kEpilogueNames, call.epilogue), " is tuned");
  }
  const EntryRecord* nearest = impl.nearest_at_any_distance(call);
  return concat("no tuned problem of ", name_of(kLayoutNames, call.layout), " ",
                name_of(kDtypeNames, call.dtype), " aligned to ", int{call.align},
                " bytes within a factor 2 of ", call.m, "x", call.n, "x", call.k, " (nearest: ",
                nearest == nullptr ? std::string("none at this alignment") : problem_text(*nearest), ")");
}

}  // namespace ktlib
