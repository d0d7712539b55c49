#include "launch/registry.hpp"

#include <mutex>
#include <utility>

namespace ktlib {
namespace {

std::mutex mutex;  // over changes; reading takes no lock

DeviceFacts cpu_facts() {
  DeviceFacts facts;
  facts.kind = DeviceKind::cpu;
  facts.cpu_archs = cpu_archs();
  return facts;
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

DeviceIndex::DeviceIndex(std::vector<std::shared_ptr<const pack::Pack>> packs, DeviceFacts facts)
    : facts_(facts), index_(std::move(packs), std::move(facts)) {
  for (const auto& pack : index_.packs()) {
    std::vector<KernelSlot> slots;
    for (const pack::KernelRecord& record : pack->kernels()) slots.push_back(make_slot(*pack, record));
    kernels_.push_back(std::move(slots));
  }
}

Registry::Registry(std::vector<std::shared_ptr<const pack::Pack>> packs, uint64_t generation)
    : packs_(std::move(packs)),
      generation_(generation),
      cpu_(std::make_unique<DeviceIndex>(packs_, cpu_facts())) {}

std::vector<std::string> Registry::set_packs(const std::vector<std::string>& paths) {
  std::vector<std::string> warnings;
  std::vector<std::shared_ptr<const pack::Pack>> packs;
  for (const std::string& path : paths) {
    try {
      packs.push_back(pack::Pack::open(path));
    } catch (const pack::PackError& error) {
      warnings.emplace_back(error.what());
    }
  }
  std::lock_guard<std::mutex> lock(mutex);
  const Registry* previous = current();
  const uint64_t generation = previous == nullptr ? 1 : previous->generation_ + 1;
  current_.store(new Registry(std::move(packs), generation), std::memory_order_release);
  return warnings;
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
