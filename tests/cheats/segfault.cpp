// Writes to an address no process can have.
#include "product.hpp"

KTLIB_CANDIDATE(segfault) {
  (void)call;
  volatile uintptr_t nowhere = uintptr_t{1} << 63;
  *reinterpret_cast<volatile int*>(nowhere) = 1;
}
