// Problems as people read them, for reasons and errors; never on the hot path.
#pragma once

#include <cstddef>
#include <string>

#include "common/problem.hpp"
#include "pack/format.hpp"

namespace ktlib {

// The name of an enum's number; "?" for a number that has none.
template <size_t kCount, typename Enum>
const char* name_of(const char* const (&names)[kCount], Enum value) {
  const auto index = static_cast<size_t>(value);
  return index < kCount ? names[index] : "?";
}

// Problem's text form, as ktlib/problem.py writes it: "4096x4096x1024:nt:bf16", then what is not at its
// default.
std::string problem_text(const Call& call);
std::string problem_text(const pack::EntryRecord& entry);

// "1.33 us", "1234 us": three significant digits, never an exponent.
std::string microseconds(double us);

}  // namespace ktlib
