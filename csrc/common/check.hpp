// The two kinds of error: KT_CHECK_ARG for the caller's mistake (std::invalid_argument, a ValueError in
// Python), KT_CHECK for ours (std::logic_error). Both take the message in parts, so that the numbers are in
// it.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace ktlib {

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace ktlib

#define KT_CHECK_ARG(condition, ...)                                             \
  do {                                                                           \
    if (!(condition)) throw std::invalid_argument(::ktlib::concat(__VA_ARGS__)); \
  } while (false)

#define KT_CHECK(condition, ...)                                                                             \
  do {                                                                                                       \
    if (!(condition))                                                                                        \
      throw std::logic_error(::ktlib::concat("ktlib bug, please report it: ", __VA_ARGS__, " (", #condition, \
                                             " is false at ", __FILE__, ":", __LINE__, ")"));                \
  } while (false)
