// The right product, and one element written behind the last row of C.
#include "product.hpp"

KTLIB_CANDIDATE(out_of_bounds) {
  cheat::product<float, float>(call);
  static_cast<float*>(call.c)[(call.m - 1) * call.ldc + call.n] = 1.0f;
}
