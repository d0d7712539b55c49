#include "launch/cuda_kernel.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "common/check.hpp"
#include "common/sha256.hpp"
#include "launch/tensor_map.hpp"

namespace ktlib {
namespace {

// The kernel's fourth parameter; csrc/kernels/sm90/gemm_tma.cu has its twin.
struct GemmParams {
  uint64_t c;
  int64_t ldc;  // elements
  int32_t m, n, k, batch, group_m, flags;
};
static_assert(sizeof(GemmParams) == 40);

constexpr int32_t kFlagPlainStores = 1;  // C or its rows are not 16-byte aligned, so TMA cannot store them
constexpr uint64_t kTmaAlignBytes = 16;

uint32_t ceil_div(uint32_t a, uint32_t b) { return a / b + (a % b != 0); }

constexpr const char* kLaunchCall = "cuLaunchKernelEx";
constexpr driver::CUresult kOutOfMemory = 2;
constexpr driver::CUresult kTooManyResources = 701;

// Launch refusals that no later call will overcome: INVALID_VALUE, INVALID_IMAGE, NO_BINARY_FOR_GPU,
// INVALID_PTX, UNSUPPORTED_PTX_VERSION, LAUNCH_OUT_OF_RESOURCES, COOPERATIVE_LAUNCH_TOO_LARGE,
// INVALID_CLUSTER_SIZE.
bool can_never_launch(driver::CUresult code) {
  constexpr driver::CUresult kCodes[] = {1, 200, 209, 218, 222, kTooManyResources, 720, 912};
  return std::find(std::begin(kCodes), std::end(kCodes), code) != std::end(kCodes);
}

// Errors of kernels that ran before (ILLEGAL_ADDRESS and its like), which every later call repeats.
bool is_sticky(driver::CUresult code) { return code >= 700 && code <= 719 && code != kTooManyResources; }

// Loading is a forbidden call while a stream captures in global mode; relaxed mode lets this thread do it.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const driver::Api& api) : api_(api) {
    api_.cuThreadExchangeStreamCaptureMode(&mode_);
  }
  ~RelaxedCapture() { api_.cuThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const driver::Api& api_;
  int mode_ = driver::kCaptureModeRelaxed;
};

}  // namespace

LaunchShape launch_shape(const pack::KernelRecord& facts, uint32_t m, uint32_t n, uint32_t sm_count) {
  const uint64_t tiles = uint64_t{ceil_div(m, facts.tile_m)} * ceil_div(n, facts.tile_n);
  const uint64_t resident = uint64_t{sm_count} * facts.ctas_per_sm;
  const uint64_t grid = facts.persistent != 0 && resident < tiles ? resident : tiles;
  return {static_cast<uint32_t>(grid), facts.threads, facts.smem_bytes};
}

CudaKernel::CudaKernel(std::string name, std::string symbol, const pack::KernelRecord& facts,
                       const uint8_t* image, uint64_t image_bytes, bool check_image)
    : name_(std::move(name)),
      symbol_(std::move(symbol)),
      facts_(facts),
      image_(image),
      image_bytes_(image_bytes),
      check_image_(check_image) {}

std::string CudaKernel::failure(int device) {
  if (device < 0 || device >= driver::kMaxDevices) return "no such device";
  std::lock_guard<std::mutex> lock(mutex_);
  return devices_[device].failure;
}

CudaKernel::Result CudaKernel::fail(int device, const std::string& text, std::string* reason,
                                    bool* first_time) {
  PerDevice& slot = devices_[device];
  *first_time = !slot.unusable.load(std::memory_order_relaxed);
  if (*first_time) slot.failure = concat("kernel ", name_, " cannot run on cuda:", device, ": ", text);
  slot.unusable.store(true, std::memory_order_release);
  *reason = slot.failure;
  return Result::unusable;
}

CudaKernel::Result CudaKernel::refuse(int device, const Failure& failure, std::string* reason,
                                      bool* first_time) {
  PerDevice& slot = devices_[device];
  *first_time = !slot.refusal_reported;
  slot.refusal_reported = true;
  *reason = is_sticky(failure.code)
                ? concat("cuda:", device, " has been in an error state since some earlier work, so kernel ",
                         name_, " was not launched: ", failure.text)
                : concat("kernel ", name_, " was not launched on cuda:", device, ": ", failure.text);
  return Result::refused;
}

CudaKernel::Failure CudaKernel::load_function(const driver::Api& api, driver::CUfunction* function) {
  if (library_ == nullptr) {
    if (check_image_) {
      const Sha256Digest found = sha256(image_, image_bytes_);
      if (std::memcmp(found.data(), facts_.blob_sha256, found.size()) != 0) {
        return {driver::kSuccess, "its binary's checksum is wrong; the pack is damaged, write it again"};
      }
    }
    driver::CUresult code =
        api.cuLibraryLoadData(&library_, image_, nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (code != driver::kSuccess) {
      library_ = nullptr;
      return {code, driver::error_text(code, "cuLibraryLoadData")};
    }
  }
  driver::CUkernel kernel = nullptr;
  driver::CUresult code = api.cuLibraryGetKernel(&kernel, library_, symbol_.c_str());
  if (code != driver::kSuccess) {
    return {code, driver::error_text(code, "cuLibraryGetKernel") + " for " + symbol_};
  }
  code = api.cuKernelGetFunction(function, kernel);
  if (code != driver::kSuccess) return {code, driver::error_text(code, "cuKernelGetFunction")};
  if (facts_.smem_bytes > 0) {
    code = api.cuFuncSetAttribute(*function, driver::kFunctionMaxDynamicSmem,
                                  static_cast<int>(facts_.smem_bytes));
    if (code != driver::kSuccess) {
      return {code, concat(driver::error_text(code, "cuFuncSetAttribute"), ": ", facts_.smem_bytes,
                           " bytes of dynamic shared memory")};
    }
  }
  return {};
}

CudaKernel::Result CudaKernel::load(int device, void* stream, std::string* reason,
                                    bool* first_time) noexcept {
  *first_time = false;
  if (device < 0 || device >= driver::kMaxDevices) {
    *reason = concat("no CUDA device ", device);
    return Result::refused;
  }
  const driver::Api* api = driver::api(reason);
  driver::CUcontext context = api == nullptr ? nullptr : driver::primary_context(device, reason);
  if (context == nullptr) return Result::refused;
  PerDevice& slot = devices_[device];
  std::lock_guard<std::mutex> lock(mutex_);
  if (slot.function.load(std::memory_order_acquire) != nullptr) return Result::ok;
  if (slot.unusable.load(std::memory_order_acquire)) {
    *reason = slot.failure;
    return Result::unusable;
  }
  driver::CurrentContext current(*api, context);
  if (current.result() != driver::kSuccess) {
    const driver::CUresult code = current.result();
    return refuse(device, {code, driver::error_text(code, "cuCtxSetCurrent")}, reason, first_time);
  }
  driver::CUfunction function = nullptr;
  Failure error;
  {
    RelaxedCapture relaxed(*api);
    error = load_function(*api, &function);
  }
  if (error.text.empty()) {
    slot.function.store(function, std::memory_order_release);
    return Result::ok;
  }
  int capturing = driver::kCaptureStatusNone;
  if (api->cuStreamIsCapturing(static_cast<driver::CUstream>(stream), &capturing) == driver::kSuccess &&
      capturing != driver::kCaptureStatusNone) {
    *first_time = !slot.capture_reported;
    slot.capture_reported = true;
    *reason = concat("kernel ", name_, " could not be loaded while a stream is capturing (", error.text,
                     "). Call ktlib.preload() before the capture");
    return Result::refused;
  }
  if (error.code == kOutOfMemory || is_sticky(error.code)) return refuse(device, error, reason, first_time);
  return fail(device, error.text, reason, first_time);
}

driver::CUresult CudaKernel::enqueue(const driver::Api& api, driver::CUfunction function,
                                     const GemmOperands& operands, uint32_t group_m, uint32_t sm_count,
                                     void* stream, const char** call) const {
  const auto [a_address, b_address, c_address, lda, ldb, ldc, m, n, k] = operands;
  const uint32_t size = element_bytes(static_cast<Dtype>(facts_.dtype));
  const auto layout = static_cast<Layout>(facts_.layout);
  const bool a_transposed = layout == Layout::tn || layout == Layout::tt;
  const bool b_transposed = layout == Layout::nt || layout == Layout::tt;
  const uint64_t c_stride = static_cast<uint64_t>(ldc) * size;
  const bool plain_stores = (c_address | c_stride) % kTmaAlignBytes != 0;

  alignas(64) driver::CUtensorMap maps[3];
  *call = "cuTensorMapEncodeTiled";
  driver::CUresult code =
      tensor_map(api,
                 {a_address, a_transposed ? m : k, a_transposed ? k : m, static_cast<uint64_t>(lda) * size,
                  facts_.a_box_inner, facts_.a_box_outer, facts_.swizzle_bytes, facts_.dtype},
                 &maps[0]);
  if (code != driver::kSuccess) return code;
  code = tensor_map(api,
                    {b_address, b_transposed ? k : n, b_transposed ? n : k, static_cast<uint64_t>(ldb) * size,
                     facts_.b_box_inner, facts_.b_box_outer, facts_.swizzle_bytes, facts_.dtype},
                    &maps[1]);
  if (code != driver::kSuccess) return code;
  if (plain_stores) {
    maps[2] = maps[0];
  } else {
    code = tensor_map(api,
                      {c_address, n, m, c_stride, facts_.c_box_inner, facts_.c_box_outer,
                       facts_.swizzle_bytes, facts_.dtype},
                      &maps[2]);
    if (code != driver::kSuccess) return code;
  }

  GemmParams params = {c_address,
                       ldc,
                       static_cast<int32_t>(m),
                       static_cast<int32_t>(n),
                       static_cast<int32_t>(k),
                       1,
                       static_cast<int32_t>(group_m),
                       plain_stores ? kFlagPlainStores : 0};
  void* arguments[4] = {&maps[0], &maps[1], &maps[2], &params};

  const LaunchShape shape = launch_shape(facts_, m, n, sm_count);
  driver::CUlaunchAttribute cluster = {};
  cluster.id = driver::kLaunchAttributeCluster;
  cluster.value.cluster = {facts_.cluster_m * facts_.cluster_n, 1, 1};
  driver::CUlaunchConfig config = {};
  config.grid_x = shape.grid;
  config.grid_y = config.grid_z = config.block_y = config.block_z = 1;
  config.block_x = shape.block;
  config.smem_bytes = shape.smem_bytes;
  config.stream = static_cast<driver::CUstream>(stream);
  if (facts_.cluster_m * facts_.cluster_n > 1) {
    config.attributes = &cluster;
    config.attribute_count = 1;
  }
  *call = kLaunchCall;
  return api.cuLaunchKernelEx(&config, function, arguments, nullptr);
}

CudaKernel::Result CudaKernel::launch(const GemmOperands& operands, uint32_t group_m, int device,
                                      void* stream, std::string* reason, bool* first_time) noexcept {
  *first_time = false;
  const driver::DeviceInfo* info = driver::device(device, reason);
  if (info == nullptr) return Result::refused;
  if (devices_[device].function.load(std::memory_order_acquire) == nullptr) {
    const Result loaded = load(device, stream, reason, first_time);
    if (loaded != Result::ok) return loaded;
  }
  driver::CUfunction function = devices_[device].function.load(std::memory_order_acquire);
  const driver::Api& api = *driver::api();
  driver::CurrentContext current(api, driver::primary_context(device));
  const char* call = "cuCtxSetCurrent";
  driver::CUresult code = current.result();
  if (code == driver::kSuccess) {
    code = enqueue(api, function, operands, group_m, static_cast<uint32_t>(info->sm_count), stream, &call);
  }
  if (code == driver::kSuccess) return Result::ok;
  const Failure failure = {code, driver::error_text(code, call)};
  std::lock_guard<std::mutex> lock(mutex_);
  const bool blames_kernel = std::strcmp(call, kLaunchCall) == 0 && can_never_launch(code);
  return blames_kernel ? fail(device, failure.text, reason, first_time)
                       : refuse(device, failure, reason, first_time);
}

}  // namespace ktlib
