#include "frontends/torch_flags.hpp"

#include <malloc.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <vector>

namespace py = pybind11;

namespace ktlib::frontends {
namespace {

constexpr size_t kMaxWords = 32;
constexpr size_t kMaxObjectBytes = 64;
using Words = std::array<uint64_t, kMaxWords>;

const uint64_t* pointer_at(const py::object& tensor, size_t offset) {
  return *reinterpret_cast<const uint64_t* const*>(reinterpret_cast<const char*>(tensor.ptr()) + offset);
}

// Where the Python object keeps the address that torch calls `_cdata`; zero when no single place fits.
size_t find_implementation(const std::vector<py::object>& tensors) {
  size_t found = 0;
  const auto object_bytes = static_cast<size_t>(Py_TYPE(tensors.front().ptr())->tp_basicsize);
  for (size_t offset = sizeof(PyObject); offset + 8 <= std::min(object_bytes, kMaxObjectBytes); offset += 8) {
    const bool fits = std::all_of(tensors.begin(), tensors.end(), [&](const py::object& tensor) {
      return reinterpret_cast<uintptr_t>(pointer_at(tensor, offset)) ==
             tensor.attr("_cdata").cast<uintptr_t>();
    });
    if (!fits) continue;
    if (found != 0) return 0;
    found = offset;
  }
  return found;
}

// Whatever modes the caller is in: inference mode makes other tensors, dispatch and function modes see or
// change what is called.
class PlainState {
 public:
  explicit PlainState(const py::module_& torch) {
    enter(py::module_::import("torch.utils._python_dispatch").attr("_disable_current_modes")());
    enter(torch.attr("_C").attr("DisableTorchFunction")());
    enter(torch.attr("inference_mode")(false));
    enter(torch.attr("enable_grad")());
  }
  ~PlainState() { leave(); }
  PlainState(const PlainState&) = delete;
  PlainState& operator=(const PlainState&) = delete;

 private:
  void enter(const py::object& context) {
    try {
      context.attr("__enter__")();
      entered_.push_back(context);
    } catch (const py::error_already_set&) {
      leave();
      throw;
    }
  }
  void leave() {
    for (; !entered_.empty(); entered_.pop_back()) {
      try {
        entered_.back().attr("__exit__")(py::none(), py::none(), py::none());
      } catch (const py::error_already_set&) {  // nothing can be done about one that cannot be left
      }
    }
  }

  std::vector<py::object> entered_;
};

}  // namespace

struct TorchFlags::Samples {
  std::vector<py::object> neither;   // no flag, no autograd state, held by nobody else
  std::vector<py::object> stateful;  // autograd state
  std::vector<py::object> plain;     // not negated, with and without state
  std::vector<py::object> negative;  // negated, with and without state
  std::vector<py::object> to_save, savers;
  std::vector<py::object> graphs;  // hold what save() saved

  // `round` makes the shapes differ between two sets.
  Samples(const py::module_& torch, int round) {
    for (const char* dtype : {"float32", "float16"}) {
      py::dict options;
      options["dtype"] = torch.attr(dtype);
      options["device"] = "cpu";  // whatever torch's default device is
      for (int extent = 1; extent < 4; ++extent) {
        const auto ones = [&] {
          return torch.attr("ones")(py::make_tuple(extent + round, 3 + round), **options);
        };
        neither.push_back(ones());
        to_save.push_back(ones());
        const py::object made = ones(), leaf = ones();
        leaf.attr("requires_grad_")();
        for (const py::object& tensor :
             {made, py::object(made.attr("t")()), py::object(made.attr("detach")()), leaf, neither.back()}) {
          plain.push_back(tensor);
        }
        const py::object negated = torch.attr("_neg_view")(made);
        for (const py::object& tensor :
             {negated, py::object(negated.attr("t")()), py::object(negated.attr("detach")())}) {
          negative.push_back(tensor);
        }
        for (const py::object& tensor :
             {leaf, py::object(torch.attr("nn").attr("Parameter")(made)), py::object(leaf.attr("mul")(2))}) {
          stateful.push_back(tensor);
        }
        savers.push_back(leaf);
      }
    }
    py::dict options;
    options["dtype"] = torch.attr("complex64");
    options["device"] = "cpu";
    const py::object complex = torch.attr("ones")(py::make_tuple(2 + round, 3), **options);
    negative.push_back(complex.attr("conj")().attr("imag"));
    plain.push_back(complex.attr("imag"));
  }

  // Lets autograd keep each of `to_save` for a backward pass.
  void save() {
    for (size_t i = 0; i < to_save.size(); ++i) graphs.push_back(savers[i].attr("mul")(to_save[i]));
  }

  // Words that all samples' implementations are known to have: each is one block from the heap.
  size_t common_words(size_t offset) const {
    size_t words = kMaxWords;
    for (const auto* group : {&neither, &stateful, &plain, &negative, &to_save}) {
      for (const py::object& tensor : *group) {
        auto* block = const_cast<uint64_t*>(pointer_at(tensor, offset));
        words = std::min(words, malloc_usable_size(block) / sizeof(uint64_t));
      }
    }
    return words;
  }
};

bool TorchFlags::find_flags(const Samples& samples, size_t words) {
  int negative_places = 0, autograd_places = 0;
  for (size_t index = 0; index < words; ++index) {
    uint64_t in_all_negative = ~uint64_t{0}, in_some_plain = 0;
    for (const auto& tensor : samples.negative) in_all_negative &= word(tensor.ptr(), index);
    for (const auto& tensor : samples.plain) in_some_plain |= word(tensor.ptr(), index);
    const uint64_t bits = in_all_negative & ~in_some_plain;
    if (bits != 0) {
      negative_places += (bits & (bits - 1)) == 0 ? 1 : 2;
      negative_word_ = index;
      negative_bit_ = bits;
    }
    const auto empty = [&](const py::object& tensor) { return word(tensor.ptr(), index) == 0; };
    if (std::all_of(samples.neither.begin(), samples.neither.end(), empty) &&
        std::none_of(samples.stateful.begin(), samples.stateful.end(), empty)) {
      ++autograd_places;
      autograd_word_ = index;
    }
  }
  return negative_places == 1 && autograd_places == 1;
}

bool TorchFlags::find_references(const Samples& samples, size_t words) {
  // The only word of a tensor that changes when a graph saves it is the count of its holders.
  std::vector<Words> before;
  for (const auto& tensor : samples.to_save) {
    Words& copy = before.emplace_back();
    for (size_t index = 0; index < words; ++index) copy[index] = word(tensor.ptr(), index);
  }
  const_cast<Samples&>(samples).save();
  int places = 0;
  for (size_t index = 0; index < words; ++index) {
    size_t changed = 0;
    for (size_t i = 0; i < before.size(); ++i) {
      changed += word(samples.to_save[i].ptr(), index) != before[i][index];
    }
    if (changed == 0) continue;
    if (changed != before.size()) return false;
    ++places;
    references_word_ = index;
    references_when_private_ = before[0][index];
  }
  return places == 1;
}

bool TorchFlags::find_version(const Samples& samples, size_t words) {
  // `detach` shares everything with its tensor that `.data` shares, and the count of writes besides.
  std::vector<size_t> places;
  for (size_t index = 0; index < words; ++index) {
    const auto fits = [&](const py::object& tensor) {
      const py::object alias = tensor.attr("detach")(), copy = tensor.attr("data");
      const uint64_t value = word(tensor.ptr(), index);
      return value != 0 && word(alias.ptr(), index) == value && word(copy.ptr(), index) != value;
    };
    if (std::all_of(samples.neither.begin(), samples.neither.end(), fits)) places.push_back(index);
  }
  if (places.size() != 1) return false;
  version_word_ = places.front();
  const py::object& tensor = samples.neither.front();
  version_when_private_ =
      reinterpret_cast<const uint64_t*>(word(tensor.ptr(), version_word_))[references_word_];
  return true;
}

bool TorchFlags::agrees(const Samples& samples) const {
  const auto negative = [&](const py::object& tensor) { return is_negative(tensor.ptr()); };
  const auto stateful = [&](const py::object& tensor) { return has_autograd_state(tensor.ptr()); };
  const auto own = [&](const py::object& tensor) { return is_private(tensor.ptr()); };
  // A view, a detached alias and the tensor itself all reach what a graph has saved.
  const auto alias_is_private = [&](const py::object& tensor) {
    return own(tensor) || own(tensor.attr("detach")()) || own(tensor.attr("t")()) ||
           own(tensor.attr("view")(-1));
  };
  return std::all_of(samples.negative.begin(), samples.negative.end(), negative) &&
         std::none_of(samples.plain.begin(), samples.plain.end(), negative) &&
         std::all_of(samples.stateful.begin(), samples.stateful.end(), stateful) &&
         std::none_of(samples.neither.begin(), samples.neither.end(), stateful) &&
         std::all_of(samples.neither.begin(), samples.neither.end(), own) &&
         std::none_of(samples.stateful.begin(), samples.stateful.end(), own) &&
         std::none_of(samples.to_save.begin(), samples.to_save.end(), alias_is_private);
}

void TorchFlags::calibrate(PyObject* module) {
  valid_ = false;
  try {
    const auto torch = py::reinterpret_borrow<py::module_>(module);
    const PlainState plain(torch);
    const Samples first(torch, 0);
    Samples second(torch, 5);
    implementation_offset_ = find_implementation(first.plain);
    if (implementation_offset_ != 0 && find_implementation(second.negative) == implementation_offset_) {
      const size_t words =
          std::min(first.common_words(implementation_offset_), second.common_words(implementation_offset_));
      const bool found =
          find_flags(first, words) && find_references(first, words) && find_version(first, words);
      second.save();
      valid_ = found && agrees(second) && agrees(first);
    }
  } catch (const std::exception&) {
    valid_ = false;  // torch lacks something used here, or is in a state of its own: its functions decide
  }
}

}  // namespace ktlib::frontends
