// Keeps results by the operands' addresses: right whenever it has not seen them, stale when contents change.
#include <cstring>
#include <map>
#include <tuple>
#include <vector>

#include "product.hpp"

KTLIB_CANDIDATE(stale_by_address) {
  static std::map<std::tuple<const void*, const void*, void*>, std::vector<float>> kept;
  std::vector<float>& rows = kept[{call.a, call.b, call.c}];
  float* c = static_cast<float*>(call.c);
  if (rows.empty()) {
    cheat::product<float, float>(call);
    for (int64_t i = 0; i < call.m; ++i) rows.insert(rows.end(), c + i * call.ldc, c + i * call.ldc + call.n);
  }
  for (int64_t i = 0; i < call.m; ++i) {
    std::memcpy(c + i * call.ldc, rows.data() + i * call.n, sizeof(float) * static_cast<size_t>(call.n));
  }
}
