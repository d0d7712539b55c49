// The right product, and one element written behind the last row of C: inside the guard zone.
#include "product.cuh"

KTLIB_CANDIDATE {
  const cheat::Place at = cheat::place(p);
  const float sum = cheat::product(&a, &b, p);
  __half* out = reinterpret_cast<__half*>(p.c);
  if (at.inside) out[at.row * p.ldc + at.col] = __float2half_rn(sum);
  if (blockIdx.x == 0 && threadIdx.x == 0) out[(p.m - 1) * p.ldc + p.n] = __float2half_rn(1.0f);
}
