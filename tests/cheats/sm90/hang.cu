// Never returns: the process must be killed, and the device be usable afterwards.
#include "product.cuh"

KTLIB_CANDIDATE {
  while (clock64() != -1) {
  }
  reinterpret_cast<__half*>(p.c)[0] = __float2half_rn(0.0f);
}
