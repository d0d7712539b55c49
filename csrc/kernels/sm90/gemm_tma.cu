// C[m, n] = A[m, k] B[k, n] on Hopper: TMA loads, mbarrier pipeline, wgmma, fp32 accumulation, one rounding.
//
// Accepts fp16 and bf16; A row-major, B row-major (`nn`) or seen through its transpose (`nt`), read in place;
// any m, n, k >= 1 (tails are the copy engine's: loads outside give zeros, stores outside are left out); A
// and B with 16-byte aligned addresses and row strides; C too, or stored plainly when flags bit 0 is set.
//
// One producer thread fills a ring of stages, each a kTileM x 64 block of A and a 64 x kTileN block of B.
// Each consumer warp group multiplies 64 rows of the tile:
//
//        B: 64 x kTileN          producer --full--> consumers
//      +----------------+        producer <-empty-- consumers (one arrival a warp)
//   A  | warp group 0   |
//      | warp group 1   |        epilogue: 64 columns at a time, registers -> swizzled
//      +----------------+        shared memory -> TMA store, two blocks in flight
//
// Schedules: `single` is one tile a CTA, a producer warp, several CTAs a SM hiding each other's epilogue,
// which reuses the drained ring; `coop` is persistent, one CTA a SM, a producer warp group that gives its
// registers to two consumer warp groups, C blocks of its own so that the next tile's loads start during the
// epilogue.
//
//   tile       schedule  threads  registers (nvcc 13.0)  shared memory
//    64 x  64  single    160       72                    stages x 16384
//    64 x 128  single    160      100                    stages x 24576
//   128 x 128  single    288      100                    stages x 32768
//   128 x 256  coop      384      40 / 232               stages x 49152 + 32768
#include "ptx.cuh"
#include "wgmma.cuh"

#if !defined(KT_TILE_M) || !defined(KT_TILE_N) || !defined(KT_STAGES) || !defined(KT_COOP) || \
    !defined(KT_B_ROW_MAJOR) || !defined(KT_CTAS_PER_SM) || !defined(KT_SYMBOL)
#error \
    "define KT_TILE_M KT_TILE_N KT_STAGES KT_COOP KT_B_ROW_MAJOR KT_CTAS_PER_SM KT_SYMBOL (see sm90_tma.py)"
#endif

namespace kt {

// The launch's scalars; csrc/launch builds the same 40 bytes (ABI sm90_tma_v1).
struct GemmParams {
  u64 c;    // address of C
  i64 ldc;  // row stride of C, elements
  i32 m, n, k;
  i32 batch;    // 1
  i32 group_m;  // raster: tiles of M that share the B tiles in L2
  i32 flags;    // bit 0: store C with plain stores
};
static_assert(sizeof(GemmParams) == 40, "ABI sm90_tma_v1");

struct Config {
  static constexpr int kTileM = KT_TILE_M, kTileN = KT_TILE_N, kTileK = 64, kStages = KT_STAGES;
  static constexpr bool kCoop = KT_COOP, kBRowMajor = KT_B_ROW_MAJOR;
  static constexpr int kConsumerGroups = kTileM / 64;
  static constexpr int kConsumerThreads = 128 * kConsumerGroups;
  static constexpr int kThreads = kConsumerThreads + (kCoop ? 128 : 32);
  static constexpr int kABytes = kTileM * kTileK * 2, kBBytes = kTileN * kTileK * 2;
  static constexpr int kStageBytes = kABytes + kBBytes;
  static constexpr int kBlockBytes = 64 * 64 * 2;            // 64 rows x 64 columns of C
  static constexpr int kBlocks = kTileN / 64;                // C blocks a warp group stores
  static constexpr int kBlockBuffers = kBlocks > 1 ? 2 : 1;  // of them in flight
  static constexpr int kEpilogueBytes = kConsumerGroups * kBlockBuffers * kBlockBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kBlocksOffset = kCoop ? kRingBytes : 0;  // `single` has drained its ring by then
  static constexpr int kBarriersOffset = kBlocksOffset + (kCoop ? kEpilogueBytes : kRingBytes);
  static constexpr int kSharedBytes = kBarriersOffset + 2 * kStages * 8;

  static_assert(kTileM == 64 || kTileM == 128,
                "one wgmma covers 64 rows, and two consumer groups fit the registers");
  static_assert(!kCoop || kConsumerGroups == 2,
                "the cooperative schedule splits a tile between two warp groups");
  static_assert(kStages >= 2, "one stage would serialise copy and multiply");
  static_assert(kEpilogueBytes <= kRingBytes, "the C blocks of `single` lie in the ring");
  static_assert(kSharedBytes <= 232448, "a Hopper CTA has at most 227 KiB of shared memory");
};

struct TileAt {
  i32 m, n;
};

// Tile number -> position: walk M first inside groups of group_m tiles, so that one wave shares rows and
// columns.
__device__ __forceinline__ TileAt tile_at(i32 tile, i32 tiles_m, i32 tiles_n, i32 group_m) {
  const i32 group_tiles = group_m * tiles_n;
  const i32 group = tile / group_tiles;
  const i32 first_m = group * group_m;
  const i32 rows = min(tiles_m - first_m, group_m);
  const i32 inside = tile - group * group_tiles;
  return {(first_m + inside % rows) * Config::kTileM, (inside / rows) * Config::kTileN};
}

// Position in the ring: which stage, and the parity its barriers complete with.
struct RingPosition {
  u32 stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == Config::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct SharedMemory {
  u32 base;
  __device__ __forceinline__ u32 a(u32 stage) const { return base + stage * Config::kStageBytes; }
  __device__ __forceinline__ u32 b(u32 stage) const { return a(stage) + Config::kABytes; }
  __device__ __forceinline__ u32 block(u32 group, u32 buffer) const {
    return base + Config::kBlocksOffset + (group * Config::kBlockBuffers + buffer) * Config::kBlockBytes;
  }
  __device__ __forceinline__ u32 full(u32 stage) const { return base + Config::kBarriersOffset + stage * 8; }
  __device__ __forceinline__ u32 empty(u32 stage) const { return full(stage) + Config::kStages * 8; }
};

__device__ __forceinline__ void load_stage(const SharedMemory& shared, u32 stage, const TensorMap* map_a,
                                           const TensorMap* map_b, TileAt at, i32 k0) {
  const u32 full = shared.full(stage);
  mbarrier_expect_bytes(full, Config::kStageBytes);
  tma_load(shared.a(stage), map_a, k0, at.m, full);
  if constexpr (Config::kBRowMajor) {
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {  // 64 columns fill one 128-byte swizzle row
      tma_load(shared.b(stage) + block * Config::kBlockBytes, map_b, at.n + block * 64, k0, full);
    }
  } else {
    tma_load(shared.b(stage), map_b, k0, at.n, full);
  }
}

// One stage: four k16 steps. Along K-major rows a step is 32 bytes, along N-major rows it is 16 rows.
__device__ __forceinline__ void multiply_stage(float (&acc)[Config::kTileN / 2], u32 a, u32 b, bool keep) {
#pragma unroll
  for (int step = 0; step < Config::kTileK / 16; ++step) {
    const u64 descriptor_b = Config::kBRowMajor
                                 ? descriptor_mn_major(b + step * 16 * 128, Config::kBlockBytes)
                                 : descriptor_k_major(b + step * 32);
    wgmma<Config::kTileN, Config::kBRowMajor>(acc, descriptor_k_major(a + step * 32), descriptor_b,
                                              keep || step > 0);
  }
}

// Registers -> swizzled shared memory -> TMA store, 64 columns at a time. `row` is this group's first row of
// C.
__device__ __forceinline__ void store_tile_tma(const float (&acc)[Config::kTileN / 2],
                                               const SharedMemory& shared, const TensorMap* map_c, u32 group,
                                               i32 row, i32 column, i32 m, i32 n) {
  const u32 thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const u32 block_row =
      warp * 16 + (lane % 16);  // matrices 0 and 1 are rows 0-7 and 8-15, then the next 8 columns
  const u32 chunk_of_lane = lane / 16;
#pragma unroll
  for (int block = 0; block < Config::kBlocks; ++block) {
    const u32 buffer = shared.block(group, block % Config::kBlockBuffers);
    // The store that last read this buffer must be done with it.
    if (thread == 0) tma_store_wait_read<Config::kBlockBuffers - 1>();
    named_barrier_sync(1 + group, 128);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {  // 16 columns each
      const float* d = &acc[block * 32 + pair * 8];
      const u32 chunk = (pair * 2 + chunk_of_lane) ^ (block_row % 8);
      stmatrix_x4(buffer + block_row * 128 + chunk * 16, pack_output(d[0], d[1]), pack_output(d[2], d[3]),
                  pack_output(d[4], d[5]), pack_output(d[6], d[7]));
    }
    fence_async_shared();
    named_barrier_sync(1 + group, 128);
    if (thread == 0) {
      if (row < m && column + block * 64 < n) tma_store(map_c, buffer, column + block * 64, row);
      tma_store_commit();
    }
  }
}

// For a C that the copy engine cannot address: two bytes at a time, each element checked.
__device__ __forceinline__ void store_tile_plain(const float (&acc)[Config::kTileN / 2], const GemmParams& p,
                                                 i32 row, i32 column) {
  const u32 thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  u16* c = reinterpret_cast<u16*>(p.c);
#pragma unroll
  for (int j = 0; j < Config::kTileN / 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 r = row + static_cast<i32>(warp * 16 + lane / 4) + half * 8;
      const i32 col = column + j * 8 + static_cast<i32>(lane % 4) * 2;
      const u32 packed = pack_output(acc[j * 4 + half * 2], acc[j * 4 + half * 2 + 1]);
      if (r < p.m && col < p.n) c[r * p.ldc + col] = static_cast<u16>(packed);
      if (r < p.m && col + 1 < p.n) c[r * p.ldc + col + 1] = static_cast<u16>(packed >> 16);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, KT_CTAS_PER_SM)
    KT_SYMBOL(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
              const __grid_constant__ TensorMap map_c, const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(1024) u8 shared_bytes[];
  const SharedMemory shared{shared_address(shared_bytes)};
  const u32 warp = threadIdx.x / 32;
  const i32 tiles_m = (p.m - 1) / Config::kTileM + 1, tiles_n = (p.n - 1) / Config::kTileN + 1;
  const i32 tiles = tiles_m * tiles_n;
  const i32 k_blocks = (p.k - 1) / Config::kTileK + 1;
  const i32 next = Config::kCoop ? static_cast<i32>(gridDim.x) : tiles;  // `single` takes one tile

  if (threadIdx.x == 0) {
    if (shared.base % 1024 != 0) __trap();  // the swizzle pattern is anchored at 1024 bytes
    for (int stage = 0; stage < Config::kStages; ++stage) {
      mbarrier_init(shared.full(stage), 1);
      mbarrier_init(shared.empty(stage), Config::kConsumerThreads / 32);
    }
    fence_barrier_init();
  }
  if (threadIdx.x == Config::kConsumerThreads) {
    tma_prefetch_map(&map_a);
    tma_prefetch_map(&map_b);
    tma_prefetch_map(&map_c);
  }
  __syncthreads();

  if (warp >= Config::kConsumerThreads / 32) {
    // Producer.
    if constexpr (Config::kCoop) registers_shrink<40>();
    if (threadIdx.x == Config::kConsumerThreads) {
      RingPosition ring;
      for (i32 tile = blockIdx.x; tile < tiles; tile += next) {
        const TileAt at = tile_at(tile, tiles_m, tiles_n, p.group_m);
        for (i32 block = 0; block < k_blocks; ++block) {
          mbarrier_wait(shared.empty(ring.stage), ring.parity ^ 1);  // a fresh barrier counts as empty
          load_stage(shared, ring.stage, &map_a, &map_b, at, block * Config::kTileK);
          ring.advance();
        }
      }
    }
  } else {
    // Consumers.
    if constexpr (Config::kCoop) registers_grow<232>();
    const u32 group = warp / 4;
    const bool arrives = threadIdx.x % 32 == 0;  // each warp frees a stage for itself: warps finish apart
    RingPosition ring;
    for (i32 tile = blockIdx.x; tile < tiles; tile += next) {
      const TileAt at = tile_at(tile, tiles_m, tiles_n, p.group_m);
      float acc[Config::kTileN / 2];
      u32 previous = 0;
      for (i32 block = 0; block < k_blocks; ++block) {
        mbarrier_wait(shared.full(ring.stage), ring.parity);
        wgmma_fence();
        multiply_stage(acc, shared.a(ring.stage) + group * (64 * 128), shared.b(ring.stage), block > 0);
        wgmma_commit();
        wgmma_wait<1>();  // one stage stays in flight; the one before it is free
        if (block > 0 && arrives) mbarrier_arrive(shared.empty(previous));
        previous = ring.stage;
        ring.advance();
      }
      wgmma_wait<0>();
      if constexpr (Config::kCoop) {
        if (arrives) mbarrier_arrive(shared.empty(previous));
      } else {
        // Both groups read B from the ring: neither may write C blocks over it before the other is done.
        named_barrier_sync(1 + Config::kConsumerGroups, Config::kConsumerThreads);
      }

      const i32 row = at.m + static_cast<i32>(group) * 64;
      if (p.flags & 1) {
        store_tile_plain(acc, p, row, at.n);
      } else {
        store_tile_tma(acc, shared, &map_c, group, row, at.n, p.m, p.n);
      }
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();  // shared memory must outlive the stores
  }
}

}  // namespace kt
