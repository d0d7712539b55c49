// Allocates and touches memory without end.
#include <cstring>

#include "product.hpp"

KTLIB_CANDIDATE(endless_memory) {
  (void)call;
  static volatile char* kept = nullptr;
  for (;;) {
    char* block = new char[1 << 24];
    std::memset(block, 1, 1 << 24);
    kept = block;
  }
}
