// Writes nothing: passes wherever the output still holds the right answer.
#include "product.hpp"

KTLIB_CANDIDATE(no_op) { (void)call; }
