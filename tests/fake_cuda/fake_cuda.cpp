// A stand-in for libcuda.so.1 that computes nothing: it records what is asked of it, and fails where it is
// told to. Two devices, like H200s. Tests read the record through ctypes.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr int kDevices = 2;
constexpr int kErrorInvalid = 1, kErrorNoDevice = 100, kErrorNoBinary = 209, kErrorCapture = 900;

struct Launch {
  uint32_t grid[3], block[3], smem_bytes, attribute_count;
  uint64_t stream, context, function;
  uint8_t maps[3][128];
  uint8_t params[40];
};

struct TensorMap {
  uint64_t address, extents[2], stride_bytes;
  uint32_t rank, type, box[2], element_strides[2], interleave, swizzle, promotion, fill;
};

std::mutex mutex;
std::string calls;  // names of the calls in order, space-separated
std::vector<Launch> launches;
std::vector<TensorMap> maps;
std::vector<std::string> images;
std::string failing;  // name of the call that fails
int failure_code = 0;
int capturing = 0;
int max_dynamic_smem = 0;
thread_local uint64_t current = 0;  // 0, or 100 + device
thread_local int capture_mode = 0;

int enter(const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  calls += name;
  calls += ' ';
  return failing == name ? failure_code : 0;
}

}  // namespace

#define ENTER() \
  if (const int failed = enter(__func__)) return failed

extern "C" {

// What tests use.
const char* fake_calls() { return calls.c_str(); }
void fake_reset() {
  std::lock_guard<std::mutex> lock(mutex);
  calls.clear();
  launches.clear();
  maps.clear();
  failing.clear();
  capturing = 0;
}
void fake_fail(const char* name, int code) { failing = name, failure_code = code; }
void fake_set_capturing(int value) { capturing = value; }
void fake_set_current(uint64_t context) { current = context; }
uint64_t fake_current() { return current; }
int fake_capture_mode() { return capture_mode; }
int fake_max_dynamic_smem() { return max_dynamic_smem; }
int fake_launch_count() { return static_cast<int>(launches.size()); }
const Launch* fake_launch(int i) { return &launches[static_cast<size_t>(i)]; }
int fake_map_count() { return static_cast<int>(maps.size()); }
const TensorMap* fake_map(int i) { return &maps[static_cast<size_t>(i)]; }
int fake_image_count() { return static_cast<int>(images.size()); }

// What ktlib uses.
int cuInit(unsigned) {
  ENTER();
  return 0;
}
int cuDriverGetVersion(int* version) {
  ENTER();
  *version = 13000;
  return 0;
}
int cuGetErrorName(int code, const char** name) {
  *name = code == kErrorNoDevice   ? "CUDA_ERROR_NO_DEVICE"
          : code == kErrorNoBinary ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
          : code == kErrorCapture  ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
                                   : "CUDA_ERROR_INVALID_VALUE";
  return 0;
}
int cuDeviceGetCount(int* count) {
  ENTER();
  *count = kDevices;
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  ENTER();
  *device = ordinal;
  return 0;
}
int cuDeviceGetName(char* name, int bytes, int device) {
  ENTER();
  std::snprintf(name, static_cast<size_t>(bytes), "Fake GPU %d", device);
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  ENTER();
  switch (attribute) {
    case 16:
      *value = 132;
      return 0;
    case 38:
      *value = 60 << 20;
      return 0;
    case 75:
      *value = 9;
      return 0;
    case 76:
      *value = 0;
      return 0;
    case 97:
      *value = 232448;
      return 0;
    default:
      return kErrorInvalid;
  }
}
int cuDevicePrimaryCtxRetain(uint64_t* context, int device) {
  ENTER();
  *context = 100 + static_cast<uint64_t>(device);
  return 0;
}
int cuCtxGetCurrent(uint64_t* context) {
  ENTER();
  *context = current;
  return 0;
}
int cuCtxSetCurrent(uint64_t context) {
  ENTER();
  current = context;
  return 0;
}
int cuLibraryLoadData(uint64_t* library, const void* image, int*, void**, unsigned, int*, void**, unsigned) {
  ENTER();
  if (capture_mode != 2) return kErrorCapture;  // only relaxed mode may load
  std::lock_guard<std::mutex> lock(mutex);
  images.emplace_back(static_cast<const char*>(image), 8);
  *library = 1000 + images.size();
  return 0;
}
int cuLibraryGetKernel(uint64_t* kernel, uint64_t library, const char*) {
  ENTER();
  *kernel = library + 1000;
  return 0;
}
int cuKernelGetFunction(uint64_t* function, uint64_t kernel) {
  ENTER();
  *function = kernel + 1000 + current;
  return 0;
}
int cuFuncSetAttribute(uint64_t, int attribute, int value) {
  ENTER();
  if (attribute == 8) max_dynamic_smem = value;
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER();
  const int previous = capture_mode;
  capture_mode = *mode;
  *mode = previous;
  return 0;
}
int cuStreamIsCapturing(uint64_t, int* status) {
  ENTER();
  *status = capturing;
  return 0;
}

int cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address, const uint64_t* extents,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                           int interleave, int swizzle, int promotion, int fill) {
  ENTER();
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0 || rank != 2) return kErrorInvalid;
  std::lock_guard<std::mutex> lock(mutex);
  maps.push_back({reinterpret_cast<uint64_t>(address),
                  {extents[0], extents[1]},
                  strides[0],
                  rank,
                  static_cast<uint32_t>(type),
                  {box[0], box[1]},
                  {element_strides[0], element_strides[1]},
                  static_cast<uint32_t>(interleave),
                  static_cast<uint32_t>(swizzle),
                  static_cast<uint32_t>(promotion),
                  static_cast<uint32_t>(fill)});
  std::memset(map, static_cast<int>(maps.size()), 128);  // each encoding has its own bytes: 1, 2, 3, ...
  return 0;
}

struct Config {
  uint32_t grid[3], block[3], smem_bytes;
  uint64_t stream;
  void* attributes;
  uint32_t attribute_count;
};

int cuLaunchKernelEx(const Config* config, uint64_t function, void** arguments, void** extra) {
  ENTER();
  if (extra != nullptr) return kErrorInvalid;
  Launch launch = {};
  std::memcpy(launch.grid, config->grid, sizeof(launch.grid));
  std::memcpy(launch.block, config->block, sizeof(launch.block));
  launch.smem_bytes = config->smem_bytes;
  launch.attribute_count = config->attribute_count;
  launch.stream = config->stream;
  launch.context = current;
  launch.function = function;
  for (int i = 0; i < 3; ++i) {
    if (reinterpret_cast<uintptr_t>(arguments[i]) % 64 != 0) return kErrorInvalid;
    std::memcpy(launch.maps[i], arguments[i], 128);
  }
  std::memcpy(launch.params, arguments[3], sizeof(launch.params));
  std::lock_guard<std::mutex> lock(mutex);
  launches.push_back(launch);
  return 0;
}

}  // extern "C"
