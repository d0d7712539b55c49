// Leaves out the columns beyond the last whole tile of 16.
#include "product.hpp"

KTLIB_CANDIDATE(skips_tail) {
  cheat::Call whole = call;
  whole.n = call.n / 16 * 16;
  cheat::product<float, float>(whole);
}
