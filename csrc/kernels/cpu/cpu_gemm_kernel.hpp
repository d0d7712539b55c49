// C[m, n] = A[m, k] B[k, n] on one CPU core: fp32, or fp16/bf16 stored and fp32 accumulated, rounded once.
//
// Accepts every m, n, k >= 0, all four layouts and any row stride (elements). k = 0 writes zeros. Reads only
// elements of A and B, writes only elements of C. Every C element is the sum over k in ascending order, one
// fused multiply-add (on the portable level a multiplication and an addition) each: tile, unroll, loop order
// and blocking never change it.
//
//        tile_n             A tile of tile_m x tile_n accumulators stays in vector registers. Each k step
//      +---------+          loads one row piece of B as vectors and broadcasts tile_m scalars of A.
//    k |    B    |          fp32 row-major B that fits the L2 cache is read where it lies; the rest is
//      +---------+          packed as fp32 in blocks, B as panels [k][tile_n].
//  k   +---------+ tile_m   Row pointers past m repeat the last row, panel columns past n are zero;
// [A]  |  C tile |          what they give is not stored.
//      +---------+
//
// Resources: about 44 KiB of stack, no workspace up to 64x64x64 or while fp32 operands are read in place,
// else kCpuWorkspaceFloats per thread. Registers: tile_m * tile_n / kLanes accumulators of 32 (v4, 16 lanes),
// 16 (v3, 8 lanes), 16 or 32 (portable, 4 lanes). Measured on an EPYC 9004 (Zen 4, 1 MiB L2).
//
// Included once a level, by isa_*.cpp, with KTLIB_CPU_LANES defined. Those files are compiled for different
// instruction sets and linked together, so everything here is in an unnamed namespace and uses no C++ library
// template or foreign inline function: the linker must never merge an AVX-512 copy into code for older CPUs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/cpu_convert.hpp"
#include "kernels/cpu/cpu_instances.hpp"

#define KTLIB_UNROLL _Pragma("GCC unroll 64")

namespace ktlib {
namespace {

constexpr int kLanes = KTLIB_CPU_LANES;

enum class Loop { mn, nm };  // the outer loop over tiles and blocks: rows (mn) or columns (nm)

constexpr int kMaxTileM = 8, kMaxTileN = 64;
constexpr int64_t kBlockM = 128, kBlockN = 256, kBlockK = 256;
constexpr int64_t kRowPad = 16;  // keeps packed rows of A out of each other's cache sets
constexpr int64_t kStackBlockM = 32, kStackBlockN = 64, kStackBlockK = 64;
constexpr int64_t kStackFloats = 4096;         // of packed A, and again of packed B
constexpr int64_t kInPlaceFloats = 64 * 1024;  // a B of this size is read in place from L2

static_assert(kBlockM * (kBlockK + kRowPad) + kBlockK * kBlockN + kBlockM * kBlockN <= kCpuWorkspaceFloats,
              "the workspace holds packed A, packed B and the partial sums");
static_assert(kStackBlockM * (kStackBlockK + kRowPad) <= kStackFloats &&
                  kStackBlockK * kStackBlockN <= kStackFloats,
              "without a workspace one small block fits the stack");
static_assert(kStackBlockM >= kMaxTileM && kStackBlockN % kMaxTileN == 0, "a block holds whole tiles");

// ---- the tile ----

// acc[tile_m][tile_n] (+)= rows of A times a panel of B; stored whole to c. Shared by the three dtypes.
using TileFn = void (*)(const float* const* rows, ptrdiff_t a_step, const float* b, ptrdiff_t ldb, int64_t k,
                        float* c, ptrdiff_t ldc, bool accumulate);

template <int kTileM, int kTileN, int kUnroll>
struct Config {
  static constexpr int kWidth = kTileN < kLanes ? kTileN : kLanes;  // lanes of one vector
  static constexpr int kVectors = kTileN / kWidth;
  static_assert(kTileM >= 1 && kTileM <= kMaxTileM, "row pointers stay in registers up to 8");
  static_assert(kTileN % kWidth == 0 && kTileN <= kMaxTileN && kMaxTileN % kTileN == 0,
                "whole vectors, whole blocks");
  static_assert(kUnroll >= 1 && kUnroll <= 8, "longer bodies leave the micro-op cache");
  typedef float Vector __attribute__((vector_size(kWidth * sizeof(float))));
};

template <int kTileM, int kTileN, int kUnroll>
__attribute__((noinline)) void multiply_tile(const float* const* rows, ptrdiff_t a_step, const float* b,
                                             ptrdiff_t ldb, int64_t k, float* c, ptrdiff_t ldc,
                                             bool accumulate) {
  using C = Config<kTileM, kTileN, kUnroll>;
  using Vector = typename C::Vector;
  constexpr int kVectors = C::kVectors, kWidth = C::kWidth;
  const float* row[kTileM];
  KTLIB_UNROLL for (int i = 0; i < kTileM; ++i) row[i] = rows[i];

  Vector acc[kTileM][kVectors];
  KTLIB_UNROLL for (int i = 0; i < kTileM; ++i) {
    KTLIB_UNROLL for (int v = 0; v < kVectors; ++v) {
      if (accumulate) {
        __builtin_memcpy(&acc[i][v], c + i * ldc + v * kWidth, sizeof(Vector));
      } else {
        acc[i][v] = Vector{};
      }
    }
  }
  ptrdiff_t offset = 0;
  const auto step = [&]() __attribute__((always_inline)) {
    Vector column[kVectors];
    KTLIB_UNROLL for (int v = 0; v < kVectors; ++v)
        __builtin_memcpy(&column[v], b + v * kWidth, sizeof(Vector));
    KTLIB_UNROLL for (int i = 0; i < kTileM; ++i) {
      const float scalar = row[i][offset];
      KTLIB_UNROLL for (int v = 0; v < kVectors; ++v) acc[i][v] += column[v] * scalar;
    }
    b += ldb;
    offset += a_step;
  };
  int64_t p = 0;
  for (; p + kUnroll <= k; p += kUnroll) {
    KTLIB_UNROLL for (int u = 0; u < kUnroll; ++u) step();
  }
  for (; p < k; ++p) step();
  KTLIB_UNROLL for (int i = 0; i < kTileM; ++i) {
    KTLIB_UNROLL for (int v = 0; v < kVectors; ++v) {
      __builtin_memcpy(c + i * ldc + v * kWidth, &acc[i][v], sizeof(Vector));
    }
  }
}

// ---- packing: operands as fp32 blocks ----

struct Product {
  const void* a;
  const void* b;
  void* c;
  int64_t m, n, k, lda, ldb, ldc;
  bool a_transposed, b_transposed;
};

struct Tile {
  int m, n;
  TileFn multiply;
};

// Where packed blocks go and how large they are. `ldap` is the row stride of packed row-major A.
struct Blocks {
  float *a, *b, *partial;
  int64_t m, n, k, ldap;
};

KTLIB_INLINE int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }
KTLIB_INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Rows [row, row + rows) x k [p, p + depth): row-major A keeps its order, transposed A becomes [k][rows].
template <Storage kStorage>
void pack_a(const Product& o, int64_t row, int64_t rows, int64_t p, int64_t depth, const Blocks& blocks) {
  const auto* a = static_cast<const typename ElementOf<kStorage>::type*>(o.a);
  if (o.a_transposed) {
    for (int64_t q = 0; q < depth; ++q)
      load_row<kStorage>(a + (p + q) * o.lda + row, blocks.a + q * rows, rows);
  } else {
    for (int64_t i = 0; i < rows; ++i)
      load_row<kStorage>(a + (row + i) * o.lda + p, blocks.a + i * blocks.ldap, depth);
  }
}

// Columns [column, column + columns) x k [p, p + depth) as one panel [k][tile_n], zeros past `columns`.
template <Storage kStorage>
void pack_b(const Product& o, int64_t column, int64_t columns, int tile_n, int64_t p, int64_t depth,
            float* panel) {
  const auto* b = static_cast<const typename ElementOf<kStorage>::type*>(o.b);
  if (!o.b_transposed) {
    for (int64_t q = 0; q < depth; ++q) {
      float* to = panel + q * tile_n;
      load_row<kStorage>(b + (p + q) * o.ldb + column, to, columns);
      for (int64_t j = columns; j < tile_n; ++j) to[j] = 0.0f;
    }
    return;
  }
  int64_t j = 0;
  for (; j + 4 <= columns; j += 4) {  // four streams are read at once so that stores are as wide as a vector
    const auto* from = b + (column + j) * o.ldb + p;
    for (int64_t q = 0; q < depth; ++q) {
      float* to = panel + q * tile_n + j;
      KTLIB_UNROLL for (int u = 0; u < 4; ++u) to[u] = load_element<kStorage>(from + u * o.ldb + q);
    }
  }
  for (; j < columns; ++j) {
    const auto* from = b + (column + j) * o.ldb + p;
    for (int64_t q = 0; q < depth; ++q) panel[q * tile_n + j] = load_element<kStorage>(from + q);
  }
  for (; j < tile_n; ++j) {
    for (int64_t q = 0; q < depth; ++q) panel[q * tile_n + j] = 0.0f;
  }
}

// ---- the product ----

// Operands that need no packing, or the whole problem in one block on the stack, or the thread's workspace.
KTLIB_INLINE Blocks choose_blocks(const Product& o, const Tile& tile, float* stack_a, float* stack_b,
                                  float* stack_partial) {
  if (o.m * o.k <= kStackFloats && round_up(o.n, tile.n) * o.k <= kStackFloats) {
    return {stack_a, stack_b, stack_partial, round_up(o.m, tile.m), round_up(o.n, tile.n), o.k, o.k};
  }
  if (float* workspace = cpu_workspace()) {
    constexpr int64_t kRow = kBlockK + kRowPad;
    return {workspace,
            workspace + kBlockM * kRow,
            workspace + kBlockM * kRow + kBlockK * kBlockN,
            kBlockM / tile.m * tile.m,
            kBlockN,
            kBlockK,
            kRow};
  }
  return {stack_a,      stack_b,      stack_partial,         kStackBlockM / tile.m * tile.m,
          kStackBlockN, kStackBlockK, kStackBlockK + kRowPad};
}

template <Storage kStorage, Loop kLoop>
struct Driver {
  using Element = typename ElementOf<kStorage>::type;
  static constexpr bool kIsFloat = kStorage == Storage::fp32;

  const Product& o;
  const Tile& tile;
  const Blocks& blocks;
  bool a_in_place, b_in_place;
  int64_t packed_a_row = -1, packed_a_p = -1, packed_b_column = -1, packed_b_p = -1;

  // One block of C, all of k. Partial sums of several k blocks stay in fp32 until the last.
  void block(int64_t row, int64_t column) {
    const int64_t rows = smaller(blocks.m, o.m - row), columns = smaller(blocks.n, o.n - column);
    Element* c = static_cast<Element*>(o.c) + row * o.ldc + column;
    const bool one_pass = o.k <= blocks.k;
    for (int64_t p = 0; p < o.k; p += blocks.k) {
      const int64_t depth = smaller(blocks.k, o.k - p);
      pack(row, rows, column, columns, p, depth);
      const int64_t outer_count = kLoop == Loop::mn ? rows : columns,
                    outer_step = kLoop == Loop::mn ? tile.m : tile.n;
      const int64_t inner_count = kLoop == Loop::mn ? columns : rows,
                    inner_step = kLoop == Loop::mn ? tile.n : tile.m;
      for (int64_t outer = 0; outer < outer_count; outer += outer_step) {
        for (int64_t inner = 0; inner < inner_count; inner += inner_step) {
          const int64_t i = kLoop == Loop::mn ? outer : inner, j = kLoop == Loop::mn ? inner : outer;
          one_tile(row, rows, column, columns, p, depth, i, j, one_pass, c);
        }
      }
    }
    if (one_pass) return;
    for (int64_t i = 0; i < rows; ++i)
      store_row<kStorage>(blocks.partial + i * blocks.n, c + i * o.ldc, columns);
  }

  void pack(int64_t row, int64_t rows, int64_t column, int64_t columns, int64_t p, int64_t depth) {
    if (!a_in_place && (packed_a_row != row || packed_a_p != p)) {
      pack_a<kStorage>(o, row, rows, p, depth, blocks);
      packed_a_row = row, packed_a_p = p;
    }
    if (packed_b_column == column && packed_b_p == p) return;
    for (int64_t j = 0; j < columns; j += tile.n) {
      const int64_t width = smaller(tile.n, columns - j);
      if (b_in_place && width == tile.n) continue;
      pack_b<kStorage>(o, column + j, width, tile.n, p, depth, blocks.b + j * depth);
    }
    packed_b_column = column, packed_b_p = p;
  }

  KTLIB_INLINE void one_tile(int64_t row, int64_t rows, int64_t column, int64_t columns, int64_t p,
                             int64_t depth, int64_t i, int64_t j, bool one_pass, Element* c) {
    const int64_t height = smaller(tile.m, rows - i), width = smaller(tile.n, columns - j);
    const float* a_rows[kMaxTileM];
    const float* base = blocks.a;
    ptrdiff_t row_step = o.a_transposed ? 1 : blocks.ldap, a_step = o.a_transposed ? rows : 1;
    if constexpr (kIsFloat) {
      if (a_in_place) {
        base = static_cast<const float*>(o.a) + (o.a_transposed ? p * o.lda + row : row * o.lda + p);
        row_step = o.a_transposed ? 1 : o.lda, a_step = o.a_transposed ? o.lda : 1;
      }
    }
    for (int r = 0; r < tile.m; ++r) a_rows[r] = base + (i + smaller(r, height - 1)) * row_step;

    const float* panel = blocks.b + j * depth;
    ptrdiff_t ldb = tile.n;
    if constexpr (kIsFloat) {
      if (b_in_place && width == tile.n)
        panel = static_cast<const float*>(o.b) + p * o.ldb + column + j, ldb = o.ldb;
    }
    if (!one_pass) {
      tile.multiply(a_rows, a_step, panel, ldb, depth, blocks.partial + i * blocks.n + j, blocks.n, p > 0);
      return;
    }
    Element* to = c + i * o.ldc + j;
    if constexpr (kIsFloat) {
      if (height == tile.m && width == tile.n) {
        tile.multiply(a_rows, a_step, panel, ldb, depth, to, o.ldc, false);
        return;
      }
    }
    alignas(64) float result[kMaxTileM * kMaxTileN];
    tile.multiply(a_rows, a_step, panel, ldb, depth, result, tile.n, false);
    for (int64_t r = 0; r < height; ++r) store_row<kStorage>(result + r * tile.n, to + r * o.ldc, width);
  }
};

template <Storage kStorage, Loop kLoop>
__attribute__((noinline)) void multiply_blocks(const Product& o, const Tile& tile) {
  using Element = typename ElementOf<kStorage>::type;
  if (o.m <= 0 || o.n <= 0) return;
  if (o.k <= 0) {
    for (int64_t i = 0; i < o.m; ++i)
      __builtin_memset(static_cast<Element*>(o.c) + i * o.ldc, 0, o.n * sizeof(Element));
    return;
  }
  alignas(64) float stack_a[kStackFloats];
  alignas(64) float stack_b[kStackFloats];
  alignas(64) float stack_partial[kStackBlockM * kStackBlockN];
  const Blocks blocks = choose_blocks(o, tile, stack_a, stack_b, stack_partial);
  // Packing an operand that only one or two tiles read costs more than it saves.
  const bool small = blocks.b == stack_b && blocks.k == o.k;
  const bool a_in_place = kStorage == Storage::fp32 && (small || o.n <= 2 * tile.n);
  const bool b_in_place = kStorage == Storage::fp32 && !o.b_transposed && (small || o.m <= 2 * tile.m);
  Driver<kStorage, kLoop> driver{o, tile, blocks, a_in_place, b_in_place};
  if (kLoop == Loop::mn) {
    for (int64_t i = 0; i < o.m; i += blocks.m)
      for (int64_t j = 0; j < o.n; j += blocks.n) driver.block(i, j);
  } else {
    for (int64_t j = 0; j < o.n; j += blocks.n)
      for (int64_t i = 0; i < o.m; i += blocks.m) driver.block(i, j);
  }
}

// ---- the instance: ABI cpu_gemm_v1 ----

template <Storage kStorage, int kTileM, int kTileN, int kUnroll, Loop kLoop>
void gemm(const void* a, const void* b, void* c, int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb,
          int64_t ldc, int layout) {
  // Numbers of ktlib::Layout: nn, nt, tn, tt.
  const bool a_transposed = (layout & 2) != 0, b_transposed = (layout & 1) != 0;
  if constexpr (kStorage == Storage::fp32) {
    // Whole tiles of operands read in place: nothing to decide a tile, which is what an 8x8x8 call needs.
    if (!b_transposed && m % kTileM == 0 && n % kTileN == 0 && k > 0 && n * k <= kInPlaceFloats &&
        (!a_transposed || m * k <= kInPlaceFloats)) {
      const ptrdiff_t row_step = a_transposed ? 1 : lda, a_step = a_transposed ? lda : 1;
      const auto tile_at = [&](int64_t i, int64_t j) __attribute__((always_inline)) {
        const float* rows[kTileM];
        KTLIB_UNROLL for (int r = 0; r < kTileM; ++r) rows[r] =
            static_cast<const float*>(a) + (i + r) * row_step;
        multiply_tile<kTileM, kTileN, kUnroll>(rows, a_step, static_cast<const float*>(b) + j, ldb, k,
                                               static_cast<float*>(c) + i * ldc + j, ldc, false);
      };
      if (kLoop == Loop::mn) {
        for (int64_t i = 0; i < m; i += kTileM)
          for (int64_t j = 0; j < n; j += kTileN) tile_at(i, j);
      } else {
        for (int64_t j = 0; j < n; j += kTileN)
          for (int64_t i = 0; i < m; i += kTileM) tile_at(i, j);
      }
      return;
    }
  }
  const Tile tile{kTileM, kTileN, &multiply_tile<kTileM, kTileN, kUnroll>};
  multiply_blocks<kStorage, kLoop>({a, b, c, m, n, k, lda, ldb, ldc, a_transposed, b_transposed}, tile);
}

#define KTLIB_CPU_INSTANCE(m, n, u, l)                               \
  {m, n, u, #l, "fp32", &gemm<Storage::fp32, m, n, u, Loop::l>},     \
      {m, n, u, #l, "fp16", &gemm<Storage::fp16, m, n, u, Loop::l>}, \
      {m, n, u, #l, "bf16", &gemm<Storage::bf16, m, n, u, Loop::l>},

const CpuInstance kInstances[] = {KTLIB_CPU_CONFIGS(KTLIB_CPU_INSTANCE)};
const CpuLevel kLevel{kInstances, sizeof(kInstances) / sizeof(kInstances[0])};

}  // namespace
}  // namespace ktlib
