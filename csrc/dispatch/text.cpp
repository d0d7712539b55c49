#include "dispatch/text.hpp"

#include <cstdio>

#include "common/check.hpp"

namespace ktlib {
namespace {

// Problem.contiguous_align: what contiguous operands have; the text form leaves it out.
uint32_t contiguous_align(const Call& call) {
  const auto layout = static_cast<uint32_t>(call.layout);
  const uint64_t a_row = (layout & 2) != 0 ? call.m : call.k, b_row = (layout & 1) != 0 ? call.k : call.n;
  const uint64_t size = element_bytes(call.dtype);
  uint32_t align = 16;
  for (const uint64_t bytes : {a_row * size, b_row * size, call.n * size})
    while (bytes % align != 0) align /= 2;
  return align;
}

}  // namespace

std::string problem_text(const Call& call) {
  std::string text = concat(call.m, "x", call.n, "x", call.k, ":", name_of(kLayoutNames, call.layout), ":",
                            name_of(kDtypeNames, call.dtype));
  if (call.accumulate != Accumulate::fp32)
    text += concat(":accumulate=", name_of(kAccumulateNames, call.accumulate));
  if (call.batch != 1) text += concat(":batch=", call.batch);
  if (call.align != contiguous_align(call)) text += concat(":align=", uint32_t{call.align});
  if (call.epilogue != Epilogue::none) text += concat(":epilogue=", name_of(kEpilogueNames, call.epilogue));
  return text;
}

std::string problem_text(const pack::EntryRecord& entry) {
  Call call;
  call.m = entry.m, call.n = entry.n, call.k = entry.k, call.batch = entry.batch;
  call.layout = static_cast<Layout>(entry.layout);
  call.dtype = static_cast<Dtype>(entry.dtype);
  call.accumulate = static_cast<Accumulate>(entry.accumulate);
  call.epilogue = static_cast<Epilogue>(entry.epilogue);
  call.align = entry.align;
  return problem_text(call);
}

std::string microseconds(double us) {
  char text[32];
  std::snprintf(text, sizeof text, us < 9.995 ? "%.2f us" : us < 99.95 ? "%.1f us" : "%.0f us", us);
  return text;
}

}  // namespace ktlib
