// A compiled CUDA kernel: loaded on first use, once per device, then launched without locks.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "driver/driver.hpp"
#include "pack/format.hpp"

namespace ktlib {

// One product as a kernel sees it; leading dimensions in elements.
struct GemmOperands {
  uint64_t a, b, c;
  int64_t lda, ldb, ldc;
  uint32_t m, n, k;
};

// The part of a launch that depends only on the kernel, the extents and the device.
struct LaunchShape {
  uint32_t grid, block, smem_bytes;
};
LaunchShape launch_shape(const pack::KernelRecord& facts, uint32_t m, uint32_t n, uint32_t sm_count);

class CudaKernel {
 public:
  // `image` (a cubin) must outlive the kernel. With `check_image` its sha256 is compared with
  // facts.blob_sha256 before the driver sees it.
  CudaKernel(std::string name, std::string symbol, const pack::KernelRecord& facts, const uint8_t* image,
             uint64_t image_bytes, bool check_image);

  const std::string& name() const { return name_; }
  const pack::KernelRecord& facts() const { return facts_; }

  enum class Result {
    ok,
    refused,   // nothing ran, nothing is known against the kernel (no memory, a load inside a stream capture)
    unusable,  // nothing ran, and nothing will on this device
  };

  // Enqueues on `stream`. On any other result than ok, `reason` says why; `first_time` is true when no
  // call has said such a thing before. Never throws, never synchronises.
  Result launch(const GemmOperands& operands, uint32_t group_m, int device, void* stream, std::string* reason,
                bool* first_time) noexcept;

  // Loads for `device` now; the same results.
  Result load(int device, void* stream, std::string* reason, bool* first_time) noexcept;

  // True when the next launch on `device` will have to load first.
  bool needs_load(int device) const noexcept {
    return device >= 0 && device < driver::kMaxDevices &&
           devices_[device].function.load(std::memory_order_acquire) == nullptr &&
           !devices_[device].unusable.load(std::memory_order_acquire);
  }

  bool usable(int device) const noexcept {
    return !devices_[device].unusable.load(std::memory_order_acquire);
  }

  // Why it cannot run on `device`; empty when nothing is known against it.
  std::string failure(int device);

 private:
  struct PerDevice {
    std::atomic<driver::CUfunction> function{nullptr};
    std::atomic<bool> unusable{false};
    std::string failure;  // guarded by mutex_
    bool capture_reported = false;
    bool refusal_reported = false;
  };

  // What a call of the driver's answered; `text` is empty for success.
  struct Failure {
    driver::CUresult code = driver::kSuccess;
    std::string text;
  };

  Result fail(int device, const std::string& text, std::string* reason, bool* first_time);
  Result refuse(int device, const Failure& failure, std::string* reason, bool* first_time);
  Failure load_function(const driver::Api& api, driver::CUfunction* function);
  driver::CUresult enqueue(const driver::Api& api, driver::CUfunction function, const GemmOperands& operands,
                           uint32_t group_m, uint32_t sm_count, void* stream, const char** call) const;

  const std::string name_, symbol_;
  const pack::KernelRecord facts_;
  const uint8_t* const image_;
  const uint64_t image_bytes_;
  const bool check_image_;
  std::mutex mutex_;
  driver::CUlibrary library_ = nullptr;  // serves every device; guarded by mutex_
  PerDevice devices_[driver::kMaxDevices];
};

}  // namespace ktlib
