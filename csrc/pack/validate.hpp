// Whether bytes are a usable pack. Pure: no file, no device; throws at the first thing that is wrong.
#pragma once

#include <stdexcept>
#include <string>

#include "pack/reader.hpp"

namespace ktlib::pack {

// Says what is wrong with a pack's content, with the numbers; the reader adds the path.
class Malformed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Checks everything but the content of the blobs. `file` must be 64-byte aligned.
void validate(Bytes file);

// The reason given for a file that cannot even hold a header.
std::string too_small(uint64_t bytes);

}  // namespace ktlib::pack
