// The right product, for the cheating CUDA candidates to hide behind. abi sm90_tma_v1, fp16, layout nt, any
// extents: 16x16 outputs a block, one a thread, boxes of 64 K by 16 rows without swizzle, plain stores of C.
// Build: nvcc -cubin -arch=sm_90a -std=c++17 -DNDEBUG -I csrc/kernels/sm90. Facts:
// tests/cheats/sm90/facts.py.
#pragma once

#include <cuda_fp16.h>

#include "ptx.cuh"

namespace cheat {

constexpr int kTile = 16, kTileK = 64;

struct GemmParams {
  kt::u64 c;
  kt::i64 ldc;
  kt::i32 m, n, k, batch, group_m, flags;
};

// Row and column of C that this thread computes.
struct Place {
  int row, col;
  bool inside;
};

__device__ inline Place place(const GemmParams& p) {
  const int tiles_n = (p.n + kTile - 1) / kTile;
  const int row = static_cast<int>(blockIdx.x) / tiles_n * kTile + static_cast<int>(threadIdx.x) / kTile;
  const int col = static_cast<int>(blockIdx.x) % tiles_n * kTile + static_cast<int>(threadIdx.x) % kTile;
  return {row, col, row < p.m && col < p.n};
}

// C[row, col] of the thread's place; every thread of the block must call it.
__device__ inline float product(const kt::TensorMap* a, const kt::TensorMap* b, const GemmParams& p) {
  __shared__ alignas(128) __half a_box[kTile * kTileK];
  __shared__ alignas(128) __half b_box[kTile * kTileK];
  __shared__ alignas(8) kt::u64 loaded;
  const int tiles_n = (p.n + kTile - 1) / kTile;
  const int row = static_cast<int>(blockIdx.x) / tiles_n * kTile;
  const int col = static_cast<int>(blockIdx.x) % tiles_n * kTile;
  const int i = static_cast<int>(threadIdx.x) / kTile, j = static_cast<int>(threadIdx.x) % kTile;
  const kt::u32 barrier = kt::shared_address(&loaded);
  if (threadIdx.x == 0) {
    kt::mbarrier_init(barrier, 1);
    kt::fence_barrier_init();
  }
  __syncthreads();
  float sum = 0.0f;
  kt::u32 parity = 0;
  for (int k = 0; k < p.k; k += kTileK) {
    if (threadIdx.x == 0) {
      kt::mbarrier_expect_bytes(barrier, 2 * kTile * kTileK * sizeof(__half));
      kt::tma_load(kt::shared_address(a_box), a, k, row, barrier);
      kt::tma_load(kt::shared_address(b_box), b, k, col, barrier);
    }
    kt::mbarrier_wait(barrier, parity);
    parity ^= 1;
    for (int x = 0; x < kTileK; ++x) {
      sum += __half2float(a_box[i * kTileK + x]) * __half2float(b_box[j * kTileK + x]);
    }
    __syncthreads();  // the boxes are overwritten next
  }
  return sum;
}

}  // namespace cheat

// Opens the kernel `candidate`; the body sees a, b and p.
#define KTLIB_CANDIDATE                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                                               \
      candidate(const __grid_constant__ kt::TensorMap a, const __grid_constant__ kt::TensorMap b, \
                const __grid_constant__ kt::TensorMap c, const __grid_constant__ cheat::GemmParams p)
