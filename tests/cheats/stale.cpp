// Computes once and returns that result for ever.
#include <vector>

#include "product.hpp"

KTLIB_CANDIDATE(stale) {
  static std::vector<float> kept;
  float* c = static_cast<float*>(call.c);
  if (kept.empty()) {
    cheat::product<float, float>(call);
    for (int64_t i = 0; i < call.m; ++i) {
      for (int64_t j = 0; j < call.n; ++j) kept.push_back(c[i * call.ldc + j]);
    }
  }
  for (int64_t i = 0; i < call.m; ++i) {
    for (int64_t j = 0; j < call.n; ++j) c[i * call.ldc + j] = kept[i * call.n + j];
  }
}
