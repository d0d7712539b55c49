// Right while it is being verified, then does nothing: the first 40 calls only, which outlasts the checks.
#include "product.hpp"

KTLIB_CANDIDATE(first_calls_only) {
  static int calls = 0;
  if (++calls <= 40) cheat::product<float, float>(call);
}
