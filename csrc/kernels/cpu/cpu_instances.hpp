// The 16 configurations of the CPU family, written once for every ISA level; generator/families/cpu_gemm.py
// has the same list with the reasons, and tests/unit/test_cpu_gemm.py compares the two. Plain data only: this
// header is included by translation units compiled for different instruction sets.
#pragma once

#include <cstdint>

// X(tile_m, tile_n, unroll, loop)
#define KTLIB_CPU_CONFIGS(X) \
  X(1, 8, 4, mn)             \
  X(1, 32, 4, mn)            \
  X(1, 64, 2, mn)            \
  X(2, 16, 4, mn)            \
  X(4, 8, 4, mn)             \
  X(4, 16, 1, mn)            \
  X(4, 16, 4, nm)            \
  X(4, 32, 2, mn)            \
  X(4, 64, 1, mn)            \
  X(6, 16, 2, mn)            \
  X(6, 16, 2, nm)            \
  X(6, 64, 1, nm)            \
  X(8, 8, 4, mn)             \
  X(8, 16, 2, mn)            \
  X(8, 32, 1, mn)            \
  X(8, 32, 1, nm)

namespace ktlib {

// ABI `cpu_gemm_v1`: strides in elements, `layout` a number of ktlib::Layout.
using CpuGemmFn = void (*)(const void* a, const void* b, void* c, int64_t m, int64_t n, int64_t k,
                           int64_t lda, int64_t ldb, int64_t ldc, int layout);

struct CpuInstance {
  int tile_m, tile_n, unroll;
  const char* loop;
  const char* dtype;
  CpuGemmFn fn;
};

// What one ISA level offers; count is 0 where its translation unit was compiled without its flags.
struct CpuLevel {
  const CpuInstance* instances;
  int count;
};

CpuLevel cpu_level_v4();
CpuLevel cpu_level_v3();
CpuLevel cpu_level_portable();

// Floats of scratch for packed blocks, 64-byte aligned, one per thread, allocated on the thread's first large
// product; null when memory is short (kernels then work in smaller blocks on the stack).
inline constexpr int64_t kCpuWorkspaceFloats = 130 * 1024;
float* cpu_workspace() noexcept;

}  // namespace ktlib
