// Writes to an address that is mapped nowhere: a sticky error, after which the process is of no use.
#include "product.cuh"

KTLIB_CANDIDATE { *reinterpret_cast<volatile int*>(0x10) = 1; }
