// Never returns.
#include "product.hpp"

KTLIB_CANDIDATE(hang) {
  volatile bool forever = true;
  while (forever) {
  }
  cheat::product<float, float>(call);
}
