#include "launch/registry.hpp"

#include <algorithm>
#include <utility>

namespace ktlib {
namespace {

std::mutex mutex;                         // over changes; reading takes no lock
std::vector<const Registry*> registries;  // every one ever in use; a generation is the position here, from 1

DeviceFacts cpu_facts() {
  DeviceFacts facts;
  facts.kind = DeviceKind::cpu;
  facts.cpu_archs = cpu_archs();
  return facts;
}

std::vector<std::shared_ptr<const pack::Pack>> opened(const OpenPacks& packs) {
  std::vector<std::shared_ptr<const pack::Pack>> result;
  for (const auto& one : packs) result.push_back(one->pack());
  return result;
}

KernelSlot make_slot(const pack::Pack& pack, const pack::KernelRecord& record) {
  KernelSlot slot;
  const std::string name(pack.name(record));
  if (record.abi == pack::kAbiCpuGemmV1) {
    slot.cpu = find_cpu_kernel(name);
  } else if (record.abi == pack::kAbiSm90TmaV1) {
    const pack::Bytes image = pack.blob(record);
    slot.cuda = std::make_unique<CudaKernel>(name, std::string(pack.symbol(record)), record, image.data,
                                             image.count, true);
  }
  return slot;
}

}  // namespace

std::atomic<const Registry*> Registry::current_{nullptr};

const std::vector<KernelSlot>& OpenPack::slots() const {
  std::call_once(once_, [this] {
    for (const pack::KernelRecord& record : pack_->kernels()) slots_.push_back(make_slot(*pack_, record));
  });
  return slots_;
}

DeviceIndex::DeviceIndex(const OpenPacks& packs, DeviceFacts facts)
    : facts_(facts), index_(opened(packs), std::move(facts)) {
  for (const auto& fitting : index_.packs()) {
    const auto same = [&](const auto& one) { return one->pack() == fitting; };
    kernels_.push_back(&(*std::find_if(packs.begin(), packs.end(), same))->slots());
  }
}

Registry::Registry(OpenPacks packs, uint64_t generation)
    : packs_(std::move(packs)),
      generation_(generation),
      cpu_(std::make_unique<DeviceIndex>(packs_, cpu_facts())) {}

std::shared_ptr<const OpenPack> Registry::known(std::shared_ptr<const pack::Pack> opened) {
  for (const Registry* one : registries) {
    for (const auto& pack : one->packs_) {
      if (pack->pack()->path() == opened->path() && pack->pack()->same_bytes(*opened)) return pack;
    }
  }
  return std::make_shared<const OpenPack>(std::move(opened));
}

void Registry::use(OpenPacks packs) {
  const auto same = [&](const Registry* one) { return one->packs_ == packs; };
  const auto found = std::find_if(registries.begin(), registries.end(), same);
  if (found == registries.end()) {
    registries.push_back(new Registry(std::move(packs), registries.size() + 1));
    current_.store(registries.back(), std::memory_order_release);
  } else {
    current_.store(*found, std::memory_order_release);
  }
}

std::vector<std::string> Registry::set_packs(const std::vector<std::string>& paths) {
  std::vector<std::string> warnings;
  OpenPacks packs;
  std::lock_guard<std::mutex> lock(mutex);
  for (const std::string& path : paths) {
    try {
      packs.push_back(known(pack::Pack::open(path)));
    } catch (const pack::PackError& error) {
      warnings.emplace_back(error.what());
    }
  }
  use(std::move(packs));
  return warnings;
}

void Registry::add_pack(const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex);
  OpenPacks packs = {known(pack::Pack::open(path))};
  if (const Registry* previous = current(); previous != nullptr) {
    for (const auto& other : previous->packs_) {
      if (other->pack()->path() != path) packs.push_back(other);
    }
  }
  use(std::move(packs));
}

const DeviceIndex* Registry::cuda(int ordinal, std::string* reason) const {
  const driver::DeviceInfo* info = driver::device(ordinal, reason);
  if (info == nullptr) return nullptr;
  const DeviceIndex* found = cuda_[ordinal].load(std::memory_order_acquire);
  if (found != nullptr) return found;
  std::lock_guard<std::mutex> lock(mutex);
  found = cuda_[ordinal].load(std::memory_order_acquire);
  if (found == nullptr) {
    DeviceFacts facts;
    facts.kind = DeviceKind::cuda;
    facts.cc_major = static_cast<uint32_t>(info->cc_major);
    facts.cc_minor = static_cast<uint32_t>(info->cc_minor);
    facts.sm_count = static_cast<uint32_t>(info->sm_count);
    found = new DeviceIndex(packs_, facts);
    cuda_[ordinal].store(found, std::memory_order_release);
  }
  return found;
}

}  // namespace ktlib
