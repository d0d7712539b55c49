// The right product, for the cheating CPU candidates to hide behind. abi cpu_gemm_v1, fp32 (or fp16 through
// _Float16), all four layouts, any row stride.
#pragma once

#include <cstdint>

namespace cheat {

struct Call {
  const void* a;
  const void* b;
  void* c;
  int64_t m, n, k, lda, ldb, ldc;
  int layout;
};

template <typename T, typename Sum>
void product(const Call& call) {
  const T* a = static_cast<const T*>(call.a);
  const T* b = static_cast<const T*>(call.b);
  T* c = static_cast<T*>(call.c);
  const bool a_transposed = (call.layout & 2) != 0, b_transposed = (call.layout & 1) != 0;
  for (int64_t i = 0; i < call.m; ++i) {
    for (int64_t j = 0; j < call.n; ++j) {
      Sum sum = 0;
      for (int64_t p = 0; p < call.k; ++p) {
        const T x = a_transposed ? a[p * call.lda + i] : a[i * call.lda + p];
        const T y = b_transposed ? b[j * call.ldb + p] : b[p * call.ldb + j];
        sum = static_cast<Sum>(sum + static_cast<Sum>(x) * static_cast<Sum>(y));
      }
      c[i * call.ldc + j] = static_cast<T>(sum);
    }
  }
}

}  // namespace cheat

// Defines the symbol `candidate` with the body that follows; the body sees `call`.
#define KTLIB_CANDIDATE(body_name)                                                                  \
  static void body_name(const cheat::Call& call);                                                   \
  extern "C" void candidate(const void* a, const void* b, void* c, int64_t m, int64_t n, int64_t k, \
                            int64_t lda, int64_t ldb, int64_t ldc, int layout) {                    \
    body_name({a, b, c, m, n, k, lda, ldb, ldc, layout});                                           \
  }                                                                                                 \
  static void body_name(const cheat::Call& call)
