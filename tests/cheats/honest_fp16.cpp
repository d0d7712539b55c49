// Not a cheat: fp16 in and out with fp32 accumulation. It must be accepted.
#include "product.hpp"

KTLIB_CANDIDATE(honest) { cheat::product<_Float16, float>(call); }
