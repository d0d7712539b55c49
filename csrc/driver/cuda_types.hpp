// The part of the CUDA driver's binary interface that ktlib uses, written out so that building needs no CUDA
// toolkit. Names, values and layouts are those of cuda.h 12 and later; the driver keeps them stable.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ktlib::driver {

using CUresult = int;
using CUdevice = int;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;
using CUfunction = struct CUfunc_st*;

inline constexpr CUresult kSuccess = 0;

// CUdevice_attribute
inline constexpr int kAttributeSmCount = 16;
inline constexpr int kAttributeL2Bytes = 38;
inline constexpr int kAttributeCcMajor = 75;
inline constexpr int kAttributeCcMinor = 76;
inline constexpr int kAttributeSmemOptinBytes = 97;

// CUfunction_attribute
inline constexpr int kFunctionMaxDynamicSmem = 8;

// CUstreamCaptureMode and CUstreamCaptureStatus
inline constexpr int kCaptureModeRelaxed = 2;
inline constexpr int kCaptureStatusNone = 0;

// CUtensorMap*
inline constexpr int kTensorMapFloat16 = 6;
inline constexpr int kTensorMapBfloat16 = 9;
inline constexpr int kInterleaveNone = 0;
inline constexpr int kPromotionL2_256B = 3;
inline constexpr int kOobFillNone = 0;

struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};
static_assert(sizeof(CUtensorMap) == 128);

inline constexpr int kLaunchAttributeCluster = 4;

struct CUlaunchAttribute {
  int id;
  int padding;
  union {
    char bytes[64];
    struct {
      unsigned int x, y, z;
    } cluster;
    uint64_t align;
  } value;
};
static_assert(sizeof(CUlaunchAttribute) == 72);

struct CUlaunchConfig {
  unsigned int grid_x, grid_y, grid_z, block_x, block_y, block_z;
  unsigned int smem_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned int attribute_count;
};
static_assert(sizeof(CUlaunchConfig) == 56 && offsetof(CUlaunchConfig, stream) == 32);

}  // namespace ktlib::driver
