// Computes with denormals flushed to zero and leaves that mode to its caller.
#include "product.hpp"

KTLIB_CANDIDATE(flushes_denormals) {
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040u);
#endif
  cheat::product<float, float>(call);
}
