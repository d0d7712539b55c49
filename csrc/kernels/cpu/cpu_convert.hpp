// One element or one row between storage and fp32: round to nearest even, subnormals, NaN and infinities
// kept, overflow to infinity. Included only by cpu_gemm_kernel.hpp; its rules (unnamed namespace, no C++
// library) hold here.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>  // every function in it is always inlined, so no copy of it is ever linked
#endif

#define KTLIB_INLINE inline __attribute__((always_inline))

namespace ktlib {
namespace {

enum class Storage { fp32, fp16, bf16 };

template <Storage kStorage>
struct ElementOf {
  using type = uint16_t;
};
template <>
struct ElementOf<Storage::fp32> {
  using type = float;
};

KTLIB_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

KTLIB_INLINE float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// Without F16C: a multiplication moves the exponent, a subtraction normalises a subnormal. No branch, so it
// vectorises.
KTLIB_INLINE float widen_fp16(uint16_t half) {
#if defined(__F16C__)
  return _cvtsh_ss(half);
#else
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  const float normal = float_of((magnitude << 13) + (0xE0u << 23)) * 0x1.0p-112f;
  const float subnormal = float_of(magnitude | (126u << 23)) - 0.5f;
  return float_of(sign | bits_of(magnitude < 0x0400u ? subnormal : normal));
#endif
}

// Without F16C: adding a power of two 13 bits above the result's last place lets the FPU round to nearest
// even.
KTLIB_INLINE uint16_t narrow_fp16(float value) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const float clamped = (float_of(magnitude) * 0x1.0p+112f) * 0x1.0p-110f;  // overflow becomes infinity here
  uint32_t exponent = magnitude & 0x7F800000u;
  if (exponent < 0x38800000u) exponent = 0x38800000u;  // below 2^-14 the last place no longer moves
  const uint32_t rounded = bits_of(clamped + float_of(exponent + 0x07800000u));
  const uint32_t finite = ((rounded >> 13) & 0x7C00u) + (rounded & 0x0FFFu);
  const uint32_t result = magnitude > 0x7F800000u ? 0x7E00u : finite;
  return static_cast<uint16_t>((bits >> 16 & 0x8000u) | result);
#endif
}

KTLIB_INLINE float widen_bf16(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }

KTLIB_INLINE uint16_t narrow_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  const uint32_t quiet = bits >> 16 | 0x40u;  // a NaN must not round to infinity
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

template <Storage kStorage>
KTLIB_INLINE float load_element(const typename ElementOf<kStorage>::type* p) {
  if constexpr (kStorage == Storage::fp32) {
    return *p;
  } else if constexpr (kStorage == Storage::fp16) {
    return widen_fp16(*p);
  } else {
    return widen_bf16(*p);
  }
}

template <Storage kStorage>
KTLIB_INLINE void store_element(typename ElementOf<kStorage>::type* p, float value) {
  if constexpr (kStorage == Storage::fp32) {
    *p = value;
  } else if constexpr (kStorage == Storage::fp16) {
    *p = narrow_fp16(value);
  } else {
    *p = narrow_bf16(value);
  }
}

// ---- rows, eight elements at a time ----

typedef uint16_t Halves __attribute__((vector_size(8 * sizeof(uint16_t))));
typedef uint32_t Words __attribute__((vector_size(8 * sizeof(uint32_t))));

template <Storage kStorage>
KTLIB_INLINE void load_eight(const typename ElementOf<kStorage>::type* from, float* to) {
  if constexpr (kStorage == Storage::bf16) {
#if defined(__AVX2__)
    // One instruction; GCC 12 makes six of the conversion below.
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const Words words = reinterpret_cast<Words>(wide) << 16;
#else
    Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words) << 16;
#endif
    __builtin_memcpy(to, &words, sizeof words);
    return;
  }
#if defined(__F16C__)
  if constexpr (kStorage == Storage::fp16) {
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    return;
  }
#endif
  for (int u = 0; u < 8; ++u) to[u] = load_element<kStorage>(from + u);
}

template <Storage kStorage>
KTLIB_INLINE void store_eight(const float* from, typename ElementOf<kStorage>::type* to) {
  if constexpr (kStorage == Storage::bf16) {  // narrow_bf16, lane by lane
    Words bits;
    __builtin_memcpy(&bits, from, sizeof bits);
    const Words rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16, quiet = bits >> 16 | 0x40u;
    const Words is_nan = reinterpret_cast<Words>((bits & 0x7FFFFFFFu) > 0x7F800000u);
    const Words result = (rounded & ~is_nan) | (quiet & is_nan);
#if defined(__AVX2__)
    const __m256i words = reinterpret_cast<__m256i>(result);
    const __m128i halves =
        _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#else
    const Halves halves = __builtin_convertvector(result, Halves);
#endif
    __builtin_memcpy(to, &halves, sizeof halves);
    return;
  }
#if defined(__F16C__)
  if constexpr (kStorage == Storage::fp16) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
    return;
  }
#endif
  for (int u = 0; u < 8; ++u) store_element<kStorage>(to + u, from[u]);
}

template <Storage kStorage>
KTLIB_INLINE void load_row(const typename ElementOf<kStorage>::type* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) load_eight<kStorage>(from + i, to + i);
  for (; i < count; ++i) to[i] = load_element<kStorage>(from + i);
}

template <Storage kStorage>
KTLIB_INLINE void store_row(const float* from, typename ElementOf<kStorage>::type* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) store_eight<kStorage>(from + i, to + i);
  for (; i < count; ++i) store_element<kStorage>(to + i, from[i]);
}

}  // namespace
}  // namespace ktlib
