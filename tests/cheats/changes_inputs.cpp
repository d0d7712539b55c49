// Zeroes A, so that a reference computed afterwards from it would agree with a zero C.
#include "product.hpp"

KTLIB_CANDIDATE(changes_inputs) {
  const bool a_transposed = (call.layout & 2) != 0;
  float* a = static_cast<float*>(const_cast<void*>(call.a));
  const int64_t rows = a_transposed ? call.k : call.m, cols = a_transposed ? call.m : call.k;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) a[i * call.lda + j] = 0.0f;
  }
  cheat::product<float, float>(call);
}
