// Not a cheat: the right product. It must be accepted, or the other fixtures prove nothing.
#include "product.hpp"

KTLIB_CANDIDATE(honest) { cheat::product<float, float>(call); }
