// Three facts about a torch tensor that the hot path needs: "holds negated values" (is_neg), "may want a
// gradient" (requires_grad) and "somebody else may hold it" (then a write into it has to be counted). torch's
// functions cost 60, 30 and 80 ns, together more than everything else on a small CPU product.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>

namespace ktlib::frontends {

// Reads them from the tensor's memory, at places found by comparing sample tensors that have a flag with
// samples that have not. When the samples do not single out one place, or a second set of samples disagrees,
// `valid()` is false and torch's functions are called instead. Nothing about its layout is assumed beyond
// what they show.
class TorchFlags {
  struct Samples;

 public:
  // Makes the samples with `module` (torch). Never raises; leaves the object invalid when anything is odd.
  void calibrate(PyObject* module);
  bool valid() const { return valid_; }

  bool is_negative(PyObject* tensor) const { return (word(tensor, negative_word_) & negative_bit_) != 0; }
  // False means requires_grad is false; true means that it has to be asked.
  bool has_autograd_state(PyObject* tensor) const { return word(tensor, autograd_word_) != 0; }
  // True when only the Python object holds the tensor and no alias shares its version: no graph can have
  // saved it, or (an inference tensor) none is able to.
  bool is_private(PyObject* tensor) const {
    const auto* version = reinterpret_cast<const uint64_t*>(word(tensor, version_word_));
    return word(tensor, references_word_) == references_when_private_ && !has_autograd_state(tensor) &&
           (version == nullptr || version[references_word_] == version_when_private_);
  }

 private:
  bool find_flags(const Samples& samples, size_t words);
  bool find_references(const Samples& samples, size_t words);
  bool find_version(const Samples& samples, size_t words);
  bool agrees(const Samples& samples) const;

  uint64_t word(PyObject* tensor, size_t index) const {
    const char* object = reinterpret_cast<const char*>(tensor);
    return (*reinterpret_cast<const uint64_t* const*>(object + implementation_offset_))[index];
  }

  bool valid_ = false;
  size_t implementation_offset_ = 0;  // in the Python object, bytes: pointer to torch's own object
  size_t negative_word_ = 0, autograd_word_ = 0;
  uint64_t negative_bit_ = 0;
  size_t references_word_ = 0;
  uint64_t references_when_private_ = 0;
  size_t version_word_ = 0;  // points to the count of writes, which aliases share
  uint64_t version_when_private_ = 0;
};

}  // namespace ktlib::frontends
