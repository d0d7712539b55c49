#include "driver/driver.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "common/check.hpp"

namespace ktlib::driver {
namespace {

constexpr const char* kDefaultLibrary = "libcuda.so.1";
constexpr const char* kForked =
    "this process was forked after CUDA was initialised, which CUDA does not support. Start workers with "
    "multiprocessing.get_context('spawn')";

// Everything learned from one attempt to open the driver. Never freed: other threads may still read it.
struct State {
  Api api;
  std::string failure;
  int device_count = 0, driver_version = 0;
  struct Device {
    DeviceInfo info;
    std::string failure;
    CUdevice handle = 0;
    std::atomic<CUcontext> primary{nullptr};
  };
  std::unique_ptr<Device[]> devices;
};

std::mutex mutex;
std::string library_path = kDefaultLibrary;
std::atomic<State*> state{nullptr};
std::atomic<bool> child_of_fork{false};

void after_fork_in_child() {
  const State* current = state.load(std::memory_order_relaxed);
  if (current != nullptr && current->failure.empty()) child_of_fork.store(true, std::memory_order_relaxed);
}

std::string describe(const Api& api, CUresult code, const char* call) {
  const char* name = nullptr;
  if (api.cuGetErrorName == nullptr || api.cuGetErrorName(code, &name) != kSuccess || name == nullptr) {
    name = "unknown error";
  }
  return concat(name, " (", code, ") from ", call);
}

void load_entry_points(State* out) {
  void* library = dlopen(library_path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    out->failure = concat("no CUDA driver: ", reason != nullptr ? reason : library_path);
    return;
  }
#define KT_LOAD(name, parameters)                                                                         \
  out->api.name = reinterpret_cast<decltype(out->api.name)>(dlsym(library, #name));                       \
  if (out->api.name == nullptr && out->failure.empty()) {                                                 \
    out->failure = concat(library_path, " has no ", #name, ": ktlib needs a driver of CUDA 12 or later"); \
  }
  KT_DRIVER_ENTRY_POINTS(KT_LOAD)
#undef KT_LOAD
}

void read_device(const Api& api, int ordinal, State::Device* out) {
  char name[256] = "";
  CUresult code = api.cuDeviceGet(&out->handle, ordinal);
  const char* call = "cuDeviceGet";
  if (code == kSuccess) code = api.cuDeviceGetName(name, sizeof(name), out->handle), call = "cuDeviceGetName";
  out->info.name = name;
  const struct {
    int attribute;
    int* value;
  } wanted[] = {{kAttributeCcMajor, &out->info.cc_major},
                {kAttributeCcMinor, &out->info.cc_minor},
                {kAttributeSmCount, &out->info.sm_count},
                {kAttributeL2Bytes, &out->info.l2_bytes},
                {kAttributeSmemOptinBytes, &out->info.smem_optin_bytes}};
  for (const auto& item : wanted) {
    if (code != kSuccess) break;
    code = api.cuDeviceGetAttribute(item.value, item.attribute, out->handle);
    call = "cuDeviceGetAttribute";
  }
  if (code != kSuccess) out->failure = concat("device ", ordinal, ": ", describe(api, code, call));
}

State* open_driver() {
  auto* out = new State;
  load_entry_points(out);
  const Api& api = out->api;
  auto check = [&](CUresult code, const char* call) {
    if (code != kSuccess && out->failure.empty()) out->failure = describe(api, code, call);
    return code == kSuccess;
  };
  if (out->failure.empty() && check(api.cuInit(0), "cuInit") &&
      check(api.cuDriverGetVersion(&out->driver_version), "cuDriverGetVersion") &&
      check(api.cuDeviceGetCount(&out->device_count), "cuDeviceGetCount")) {
    if (out->device_count > kMaxDevices) out->device_count = kMaxDevices;
    out->devices = std::make_unique<State::Device[]>(out->device_count);
    for (int i = 0; i < out->device_count; ++i) read_device(api, i, &out->devices[i]);
  }
  return out;
}

const State& opened() {
  State* current = state.load(std::memory_order_acquire);
  if (current != nullptr) return *current;
  std::lock_guard<std::mutex> lock(mutex);
  current = state.load(std::memory_order_acquire);
  if (current == nullptr) {
    current = open_driver();
    static std::once_flag fork_handler;
    std::call_once(fork_handler, [] { pthread_atfork(nullptr, nullptr, after_fork_in_child); });
    state.store(current, std::memory_order_release);
  }
  return *current;
}

State::Device* find_device(int ordinal, std::string* reason) {
  if (api(reason) == nullptr) return nullptr;
  const State& current = opened();
  if (ordinal < 0 || ordinal >= current.device_count) {
    if (reason != nullptr) *reason = concat("no CUDA device ", ordinal, " (have ", current.device_count, ")");
    return nullptr;
  }
  State::Device* found = &current.devices[ordinal];
  if (found->failure.empty()) return found;
  if (reason != nullptr) *reason = found->failure;
  return nullptr;
}

}  // namespace

void set_library(const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex);
  const State* current = state.load(std::memory_order_acquire);
  if (current != nullptr && current->failure.empty()) {
    throw std::logic_error(concat("the CUDA driver is already in use (", library_path, "), so ", path,
                                  " cannot be loaded. Set KTLIB_LIBCUDA before the first CUDA call"));
  }
  library_path = path.empty() ? kDefaultLibrary : path;
  state.store(nullptr, std::memory_order_release);
}

const Api* api(std::string* reason) {
  if (forked()) {
    if (reason != nullptr) *reason = kForked;
    return nullptr;
  }
  const State& current = opened();
  if (current.failure.empty()) return &current.api;
  if (reason != nullptr) *reason = current.failure;
  return nullptr;
}

std::string status() {
  std::string reason;
  api(&reason);
  return reason;
}

bool forked() { return child_of_fork.load(std::memory_order_relaxed); }

int device_count() { return api() == nullptr ? 0 : opened().device_count; }

int driver_version() { return api() == nullptr ? 0 : opened().driver_version; }

const DeviceInfo* device(int ordinal, std::string* reason) {
  const State::Device* found = find_device(ordinal, reason);
  return found == nullptr ? nullptr : &found->info;
}

CUcontext primary_context(int ordinal, std::string* reason) {
  State::Device* found = find_device(ordinal, reason);
  if (found == nullptr) return nullptr;
  CUcontext context = found->primary.load(std::memory_order_acquire);
  if (context != nullptr) return context;
  std::lock_guard<std::mutex> lock(mutex);
  context = found->primary.load(std::memory_order_acquire);
  if (context != nullptr) return context;
  const CUresult code = opened().api.cuDevicePrimaryCtxRetain(&context, found->handle);
  if (code != kSuccess) {
    if (reason != nullptr) *reason = error_text(code, "cuDevicePrimaryCtxRetain");
    return nullptr;
  }
  found->primary.store(context, std::memory_order_release);
  return context;
}

std::string error_text(CUresult code, const char* call) { return describe(opened().api, code, call); }

CurrentContext::CurrentContext(const Api& api, CUcontext context) : api_(api) {
  result_ = api_.cuCtxGetCurrent(&previous_);
  if (result_ != kSuccess || previous_ == context) return;
  result_ = api_.cuCtxSetCurrent(context);
  switched_ = result_ == kSuccess;
}

CurrentContext::~CurrentContext() {
  if (switched_) api_.cuCtxSetCurrent(previous_);
}

}  // namespace ktlib::driver
