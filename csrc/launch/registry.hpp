// The packs in use and what was made of them: one Index per device and the kernels they name. Replaced whole
// when the packs change; replaced ones stay alive, because another thread may still be launching from them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dispatch/dispatch.hpp"
#include "driver/driver.hpp"
#include "kernels/cpu/cpu_gemm.hpp"
#include "launch/cuda_kernel.hpp"

namespace ktlib {

// What runs a chosen kernel: exactly one of the two is set, or none when this build has no such CPU instance.
struct KernelSlot {
  CpuGemmFn cpu = nullptr;
  std::unique_ptr<CudaKernel> cuda;
};

// The index of one device with its kernels beside it.
class DeviceIndex {
 public:
  DeviceIndex(std::vector<std::shared_ptr<const pack::Pack>> packs, DeviceFacts facts);
  const Index& index() const { return index_; }
  const DeviceFacts& facts() const { return facts_; }
  const KernelSlot& slot(const Choice& choice) const {
    return kernels_[choice.pack_index][choice.kernel_index];
  }
  const std::vector<std::vector<KernelSlot>>& kernels() const { return kernels_; }

 private:
  DeviceFacts facts_;
  Index index_;
  std::vector<std::vector<KernelSlot>> kernels_;  // by pack, then kernel
};

class Registry {
 public:
  // Opens the packs in layer order, first wins; returns one warning for each that cannot be used.
  static std::vector<std::string> set_packs(const std::vector<std::string>& paths);

  // Null before the first set_packs.
  static const Registry* current() noexcept { return current_.load(std::memory_order_acquire); }

  // Distinguishes registries: memos made from another generation are void.
  uint64_t generation() const noexcept { return generation_; }
  const std::vector<std::shared_ptr<const pack::Pack>>& packs() const noexcept { return packs_; }

  const DeviceIndex& cpu() const noexcept { return *cpu_; }
  // Null with the reason when the device cannot be used. Made on first use.
  const DeviceIndex* cuda(int ordinal, std::string* reason) const;

 private:
  Registry(std::vector<std::shared_ptr<const pack::Pack>> packs, uint64_t generation);

  static std::atomic<const Registry*> current_;
  std::vector<std::shared_ptr<const pack::Pack>> packs_;
  uint64_t generation_;
  std::unique_ptr<DeviceIndex> cpu_;
  mutable std::atomic<const DeviceIndex*> cuda_[driver::kMaxDevices] = {};
};

}  // namespace ktlib
