// The packs in use and what was made of them: one Index per device and the kernels they name. Replaced whole
// when the packs change; replaced ones stay alive, because another thread may still be launching from them.
// They stay small: a pack with the same bytes is kept, with its kernels, and so is a list of packs that was
// in use before.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
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

// A pack with its kernels, which serve every device and every registry.
class OpenPack {
 public:
  explicit OpenPack(std::shared_ptr<const pack::Pack> pack) : pack_(std::move(pack)) {}
  const std::shared_ptr<const pack::Pack>& pack() const { return pack_; }
  const std::vector<KernelSlot>& slots() const;  // made on first use

 private:
  std::shared_ptr<const pack::Pack> pack_;
  mutable std::once_flag once_;
  mutable std::vector<KernelSlot> slots_;
};
using OpenPacks = std::vector<std::shared_ptr<const OpenPack>>;

// The index of one device with its kernels beside it. `packs` must outlive it.
class DeviceIndex {
 public:
  DeviceIndex(const OpenPacks& packs, DeviceFacts facts);
  const Index& index() const { return index_; }
  const DeviceFacts& facts() const { return facts_; }
  const KernelSlot& slot(const Choice& choice) const {
    return (*kernels_[choice.pack_index])[choice.kernel_index];
  }
  const std::vector<const std::vector<KernelSlot>*>& kernels() const { return kernels_; }

 private:
  DeviceFacts facts_;
  Index index_;
  std::vector<const std::vector<KernelSlot>*> kernels_;  // by pack, then kernel
};

class Registry {
 public:
  // Opens the packs in layer order, first wins; returns one warning for each that cannot be used.
  static std::vector<std::string> set_packs(const std::vector<std::string>& paths);

  // Opens one pack and puts it in front; the others stay as they were opened. Throws pack::PackError.
  static void add_pack(const std::string& path);

  // Null before the first set_packs.
  static const Registry* current() noexcept { return current_.load(std::memory_order_acquire); }

  // Distinguishes registries: memos made from another generation are void.
  uint64_t generation() const noexcept { return generation_; }
  const OpenPacks& packs() const noexcept { return packs_; }

  const DeviceIndex& cpu() const noexcept { return *cpu_; }
  // Null with the reason when the device cannot be used. Made on first use.
  const DeviceIndex* cuda(int ordinal, std::string* reason) const;

 private:
  Registry(OpenPacks packs, uint64_t generation);
  static std::shared_ptr<const OpenPack> known(std::shared_ptr<const pack::Pack> opened);
  static void use(OpenPacks packs);

  static std::atomic<const Registry*> current_;
  OpenPacks packs_;
  uint64_t generation_;
  std::unique_ptr<DeviceIndex> cpu_;
  mutable std::atomic<const DeviceIndex*> cuda_[driver::kMaxDevices] = {};
};

}  // namespace ktlib
