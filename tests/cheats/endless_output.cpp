// Prints without end.
#include <cstdio>

#include "product.hpp"

KTLIB_CANDIDATE(endless_output) {
  (void)call;
  for (;;) std::puts("all checks passed, latency 0.001 us");
}
