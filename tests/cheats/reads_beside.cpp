// Reads one element behind each row of A and adds it times zero: harmless unless NaN stands there.
#include "product.hpp"

KTLIB_CANDIDATE(reads_beside) {
  cheat::product<float, float>(call);
  if ((call.layout & 2) != 0 || call.lda == call.k) return;
  const float* a = static_cast<const float*>(call.a);
  float* c = static_cast<float*>(call.c);
  for (int64_t i = 0; i < call.m; ++i) {
    for (int64_t j = 0; j < call.n; ++j) c[i * call.ldc + j] += 0.0f * a[i * call.lda + call.k];
  }
}
