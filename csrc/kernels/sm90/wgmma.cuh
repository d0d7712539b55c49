// wgmma: m64nNk16, fp32 accumulators in registers, both operands in shared memory with the 128-byte swizzle.
//
// Accumulator layout (PTX ISA, "Register fragments for wgmma"): thread t of the warp group holds, for each
// 8-column group j, rows 16 (t / 32) + (t % 32) / 4 and that + 8, columns 8 j + 2 (t % 4) and that + 1, in
// accumulator[4 j .. 4 j + 3].
#pragma once

#include "ptx.cuh"

#ifndef KT_BF16
#error "define KT_BF16 as 0 (fp16 operands) or 1 (bf16 operands)"
#endif

namespace kt {

// Operand contiguous along K: rows of 128 bytes, 8 rows an atom, atoms 1024 bytes apart. K advances by
// address.
__device__ __forceinline__ u64 descriptor_k_major(u32 address) {
  return u64{(address & 0x3FFFF) >> 4} | (u64{1} << 16) | (u64{1024 >> 4} << 32) | (u64{1} << 62);
}

// Operand contiguous along N: atoms of 64 columns by 8 k rows; the next 8 k rows are 1024 bytes on, the next
// 64 columns `column_block_bytes` on.
__device__ __forceinline__ u64 descriptor_mn_major(u32 address, u32 column_block_bytes) {
  return u64{(address & 0x3FFFF) >> 4} | (u64{column_block_bytes >> 4} << 16) | (u64{1024 >> 4} << 32) |
         (u64{1} << 62);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#if KT_BF16
#define KT_WGMMA_TYPES "f32.bf16.bf16"
#else
#define KT_WGMMA_TYPES "f32.f16.f16"
#endif

// Placeholders %0..%127 of the accumulators, 32 at a time, and their operands.
#define KT_PLACES_0                                                                                         \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%" \
  "28,"                                                                                                     \
  "%29,%30,%31"
#define KT_PLACES_1                                                                                        \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%" \
  "57,"                                                                                                    \
  "%58,%59,%60,%61,%62,%63"
#define KT_PLACES_2                                                                                        \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%" \
  "89,"                                                                                                    \
  "%90,%91,%92,%93,%94,%95"
#define KT_PLACES_3                                                                                         \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%" \
  "117,"                                                                                                    \
  "%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define KT_ACC_8(i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define KT_ACC_32(i) KT_ACC_8(i), KT_ACC_8(i + 8), KT_ACC_8(i + 16), KT_ACC_8(i + 24)

// `places` are the accumulators; a, b, keep and transpose are the placeholders that follow them.
#define KT_WGMMA_ASM(n, places, a, b, keep, transpose)                                       \
  "{\n.reg .pred keep;\nsetp.ne.b32 keep, " keep ", 0;\nwgmma.mma_async.sync.aligned.m64n" n \
  "k16." KT_WGMMA_TYPES " {" places "}, " a ", " b ", keep, 1, 1, 0, " transpose ";\n}\n"

// d = A B + (keep ? d : 0). `kTransposeB` reads B contiguous along N.
template <int kTileN, int kTransposeB>
__device__ __forceinline__ void wgmma(float (&d)[kTileN / 2], u64 a, u64 b, i32 keep) {
  static_assert(kTileN == 64 || kTileN == 128 || kTileN == 192 || kTileN == 256,
                "a C tile is stored in blocks of 64 columns");
  if constexpr (kTileN == 64) {
    asm volatile(KT_WGMMA_ASM("64", KT_PLACES_0, "%32", "%33", "%34", "%35")
                 : KT_ACC_32(0)
                 : "l"(a), "l"(b), "r"(keep), "n"(kTransposeB));
  } else if constexpr (kTileN == 128) {
    asm volatile(KT_WGMMA_ASM("128", KT_PLACES_0 KT_PLACES_1, "%64", "%65", "%66", "%67")
                 : KT_ACC_32(0), KT_ACC_32(32)
                 : "l"(a), "l"(b), "r"(keep), "n"(kTransposeB));
  } else if constexpr (kTileN == 192) {
    asm volatile(KT_WGMMA_ASM("192", KT_PLACES_0 KT_PLACES_1 KT_PLACES_2, "%96", "%97", "%98", "%99")
                 : KT_ACC_32(0), KT_ACC_32(32), KT_ACC_32(64)
                 : "l"(a), "l"(b), "r"(keep), "n"(kTransposeB));
  } else {
    asm volatile(
        KT_WGMMA_ASM("256", KT_PLACES_0 KT_PLACES_1 KT_PLACES_2 KT_PLACES_3, "%128", "%129", "%130", "%131")
        : KT_ACC_32(0), KT_ACC_32(32), KT_ACC_32(64), KT_ACC_32(96)
        : "l"(a), "l"(b), "r"(keep), "n"(kTransposeB));
  }
}

__device__ __forceinline__ u32 pack_output(float low, float high) {
#if KT_BF16
  return pack_bf16(low, high);
#else
  return pack_fp16(low, high);
#endif
}

}  // namespace kt
