#include "dispatch/choice_dict.hpp"

#include <algorithm>
#include <limits>

#include "common/check.hpp"
#include "dispatch/text.hpp"

namespace py = pybind11;

namespace ktlib {
namespace {

uint32_t read_integer(const char* name, const py::handle& value, uint32_t high) {
  KT_CHECK_ARG(py::isinstance<py::int_>(value), "call: ", name, " must be an integer, got ",
               std::string(py::repr(value)));
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  KT_CHECK_ARG(overflow == 0 && number >= 0 && number <= high, "call: ", name, " must be in 0..", high,
               ", got ", std::string(py::repr(value)));
  return static_cast<uint32_t>(number);
}

template <typename Enum, size_t kCount>
Enum read_name(const char* name, const char* const (&names)[kCount], const py::handle& value) {
  const std::string text = py::str(value);
  const auto* const found = std::find(std::begin(names), std::end(names), text);
  if (found == std::end(names)) {
    std::string have;
    for (const char* one : names) have += concat(have.empty() ? "" : ", ", one);
    throw std::invalid_argument(concat("call: ", name, " '", text, "' is unknown (have: ", have, ")"));
  }
  return static_cast<Enum>(found - std::begin(names));
}

uint8_t read_align(const char* name, const py::handle& value) {
  const uint32_t align = read_integer(name, value, 16);
  KT_CHECK_ARG(align != 0 && (align & (align - 1)) == 0, "call: ", name,
               " must be one of 1, 2, 4, 8, 16, got ", align);
  return static_cast<uint8_t>(align);
}

py::dict launch_dict(const Choice& choice, const Call& call, uint32_t sm_count) {
  py::dict launch;
  const pack::KernelRecord& kernel = *choice.kernel;
  if (kernel.abi != pack::kAbiSm90TmaV1) return launch;  // a plain function call
  const uint64_t tiles = (uint64_t{call.m} + kernel.tile_m - 1) / kernel.tile_m *
                         ((uint64_t{call.n} + kernel.tile_n - 1) / kernel.tile_n);
  const uint64_t resident = uint64_t{sm_count} * kernel.ctas_per_sm;
  launch["grid"] = kernel.persistent != 0 ? std::min(tiles, resident) : tiles;
  launch["block"] = kernel.threads;
  launch["smem_bytes"] = kernel.smem_bytes;
  launch["cluster_m"] = kernel.cluster_m;
  launch["cluster_n"] = kernel.cluster_n;
  launch["group_m"] = choice.entry->group_m;
  launch["split_k"] = choice.entry->split_k;
  return launch;
}

}  // namespace

Call call_from_dict(const py::dict& fields) {
  constexpr uint32_t kMaxExtent = std::numeric_limits<int32_t>::max();
  for (const char* name : {"m", "n", "k", "layout", "dtype"})
    KT_CHECK_ARG(fields.contains(name), "call: ", name, " is missing");
  Call call;
  bool has_align_ab = false;
  for (const auto& [key, value] : fields) {
    const std::string name = py::str(key);
    if (name == "m")
      call.m = read_integer("m", value, kMaxExtent);
    else if (name == "n")
      call.n = read_integer("n", value, kMaxExtent);
    else if (name == "k")
      call.k = read_integer("k", value, kMaxExtent);
    else if (name == "batch")
      call.batch = read_integer("batch", value, kMaxExtent);
    else if (name == "layout")
      call.layout = read_name<Layout>("layout", kLayoutNames, value);
    else if (name == "dtype")
      call.dtype = read_name<Dtype>("dtype", kDtypeNames, value);
    else if (name == "accumulate")
      call.accumulate = read_name<Accumulate>("accumulate", kAccumulateNames, value);
    else if (name == "epilogue")
      call.epilogue = read_name<Epilogue>("epilogue", kEpilogueNames, value);
    else if (name == "align")
      call.align = read_align("align", value);
    else if (name == "align_ab")
      call.align_ab = read_align("align_ab", value), has_align_ab = true;
    else
      KT_CHECK_ARG(name == "device", "call: unknown field '", name, "'");
  }
  if (!has_align_ab) call.align_ab = call.align;
  KT_CHECK_ARG(call.align_ab >= call.align, "call: align_ab ", int{call.align_ab}, " is less than align ",
               int{call.align}, ", which covers A and B too");
  return call;
}

py::dict choice_to_dict(const Index& index, const Call& call, const Choice& choice, uint32_t sm_count) {
  py::dict result;
  const bool tuned = choice.kernel != nullptr;
  result["kernel"] = tuned ? std::string(choice.pack->name(*choice.kernel)) : std::string();
  result["tier"] = name_of(kTierNames, choice.tier);
  result["reason"] = path_text(index.explain(call, choice));  // may name a path
  result["database"] = choice.pack != nullptr ? path_text(choice.pack->path()) : py::str("");
  result["launch"] = tuned ? launch_dict(choice, call, sm_count) : py::dict();
  // The times are those of the tuned problem, which under `near` is another than the call's.
  const bool timed = choice.entry != nullptr && choice.entry->latency_us > 0;
  result["latency_us"] = timed ? py::object(py::float_(choice.entry->latency_us)) : py::none();
  result["vendor_us"] =
      choice.entry != nullptr ? py::object(py::float_(choice.entry->vendor_us)) : py::none();
  return result;
}

std::string path_bytes(const py::object& path) {
  PyObject* bytes = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &bytes) == 0) throw py::error_already_set();
  return py::reinterpret_steal<py::bytes>(bytes);
}

py::object path_text(const std::string& path) {
  PyObject* text = PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size()));
  if (text == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(text);
}

}  // namespace ktlib
