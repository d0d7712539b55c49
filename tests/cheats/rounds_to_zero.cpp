// Leaves its process rounding to zero: candidates after it would be wrong through no fault of theirs.
#include <cfenv>

#include "product.hpp"

KTLIB_CANDIDATE(rounds_to_zero) {
  cheat::product<float, float>(call);
  std::fesetround(FE_TOWARDZERO);
}
