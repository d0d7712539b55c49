// libcuda, opened on first GPU use: a table of the entry points used, and the facts of each device. Links
// nothing; a machine without a driver gets a reason instead of an exception.
#pragma once

#include <cstdint>
#include <string>

#include "driver/cuda_types.hpp"

namespace ktlib::driver {

// One line per entry point: the driver's name, then its parameters.
#define KT_DRIVER_ENTRY_POINTS(X)                                                                         \
  X(cuInit, (unsigned int))                                                                               \
  X(cuDriverGetVersion, (int*))                                                                           \
  X(cuGetErrorName, (CUresult, const char**))                                                             \
  X(cuDeviceGetCount, (int*))                                                                             \
  X(cuDeviceGet, (CUdevice*, int))                                                                        \
  X(cuDeviceGetName, (char*, int, CUdevice))                                                              \
  X(cuDeviceGetAttribute, (int*, int, CUdevice))                                                          \
  X(cuDevicePrimaryCtxRetain, (CUcontext*, CUdevice))                                                     \
  X(cuCtxGetCurrent, (CUcontext*))                                                                        \
  X(cuCtxSetCurrent, (CUcontext))                                                                         \
  X(cuLibraryLoadData, (CUlibrary*, const void*, int*, void**, unsigned int, int*, void**, unsigned int)) \
  X(cuLibraryGetKernel, (CUkernel*, CUlibrary, const char*))                                              \
  X(cuKernelGetFunction, (CUfunction*, CUkernel))                                                         \
  X(cuFuncSetAttribute, (CUfunction, int, int))                                                           \
  X(cuLaunchKernelEx, (const CUlaunchConfig*, CUfunction, void**, void**))                                \
  X(cuTensorMapEncodeTiled, (CUtensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*,        \
                             const uint32_t*, const uint32_t*, int, int, int, int))                       \
  X(cuThreadExchangeStreamCaptureMode, (int*))                                                            \
  X(cuStreamIsCapturing, (CUstream, int*))

struct Api {
#define KT_DECLARE(name, parameters) CUresult(*name) parameters = nullptr;
  KT_DRIVER_ENTRY_POINTS(KT_DECLARE)
#undef KT_DECLARE
};

inline constexpr int kMaxDevices = 64;

struct DeviceInfo {
  std::string name;
  int cc_major = 0, cc_minor = 0, sm_count = 0, l2_bytes = 0, smem_optin_bytes = 0;
};

// Where libcuda is looked for; empty restores libcuda.so.1. Throws std::logic_error once a driver is in use.
void set_library(const std::string& path);

// The table, after cuInit has succeeded in this process; null with the reason (when asked for) otherwise. The
// first call may take long; later calls are two loads.
const Api* api(std::string* reason = nullptr);

// Empty when CUDA can be used, else why not.
std::string status();

// True in a child forked after cuInit: the driver does not survive fork, only spawn works.
bool forked();

int device_count();
int driver_version();

// Null with the reason when there is no such device.
const DeviceInfo* device(int ordinal, std::string* reason = nullptr);

// The device's primary context, retained once for the process; null with the reason.
CUcontext primary_context(int ordinal, std::string* reason = nullptr);

// "CUDA_ERROR_INVALID_VALUE (1) from cuCtxSetCurrent".
std::string error_text(CUresult code, const char* call);

// Makes a context current and puts the previous one back; touches nothing when it is current already.
class CurrentContext {
 public:
  CurrentContext(const Api& api, CUcontext context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  CUresult result() const { return result_; }

 private:
  const Api& api_;
  CUcontext previous_ = nullptr;
  bool switched_ = false;
  CUresult result_ = kSuccess;
};

}  // namespace ktlib::driver
