// Not a cheat: the right product. It must be accepted, or the other fixtures prove nothing.
#include "product.cuh"

KTLIB_CANDIDATE {
  const cheat::Place at = cheat::place(p);
  const float sum = cheat::product(&a, &b, p);
  if (at.inside) reinterpret_cast<__half*>(p.c)[at.row * p.ldc + at.col] = __float2half_rn(sum);
}
