#include "launch/bind_driver.hpp"

#include <limits>

#include "common/check.hpp"
#include "common/problem.hpp"
#include "dispatch/choice_dict.hpp"
#include "driver/driver.hpp"
#include "launch/cuda_kernel.hpp"
#include "pack/reader.hpp"

namespace py = pybind11;

namespace ktlib {
namespace {

template <size_t kCount>
uint32_t number_of(const char* const (&names)[kCount], const char* field, const std::string& text) {
  for (uint32_t i = 0; i < kCount; ++i) {
    if (names[i][0] != '\0' && text == names[i]) return i;
  }
  throw std::invalid_argument(concat("facts: ", field, " '", text, "' is unknown"));
}

struct NumericFact {
  const char* name;
  uint32_t pack::KernelRecord::*field;
};

// KernelFacts' integers; generator/families/base.py has the meanings.
constexpr NumericFact kNumericFacts[] = {
    {"tile_m", &pack::KernelRecord::tile_m},
    {"tile_n", &pack::KernelRecord::tile_n},
    {"tile_k", &pack::KernelRecord::tile_k},
    {"threads", &pack::KernelRecord::threads},
    {"cluster_m", &pack::KernelRecord::cluster_m},
    {"cluster_n", &pack::KernelRecord::cluster_n},
    {"smem_bytes", &pack::KernelRecord::smem_bytes},
    {"ctas_per_sm", &pack::KernelRecord::ctas_per_sm},
    {"persistent", &pack::KernelRecord::persistent},
    {"min_align_bytes", &pack::KernelRecord::min_align_bytes},
    {"a_box_inner", &pack::KernelRecord::a_box_inner},
    {"a_box_outer", &pack::KernelRecord::a_box_outer},
    {"b_box_inner", &pack::KernelRecord::b_box_inner},
    {"b_box_outer", &pack::KernelRecord::b_box_outer},
    {"c_box_inner", &pack::KernelRecord::c_box_inner},
    {"c_box_outer", &pack::KernelRecord::c_box_outer},
    {"swizzle_bytes", &pack::KernelRecord::swizzle_bytes},
    {"registers", &pack::KernelRecord::registers},
    {"num_stages", &pack::KernelRecord::num_stages},
    {"spill_bytes", &pack::KernelRecord::spill_bytes},
    {"k_multiple", &pack::KernelRecord::k_multiple},
};

pack::KernelRecord record_from(const py::dict& facts) {
  const auto text = [&](const char* name) {
    KT_CHECK_ARG(facts.contains(name), "facts: ", name, " is missing; pass KernelFacts.to_dict()");
    return std::string(py::str(facts[name]));
  };
  pack::KernelRecord record = {};
  record.family = number_of(pack::kFamilyNames, "family", text("family"));
  record.abi = number_of(pack::kAbiNames, "abi", text("abi"));
  KT_CHECK_ARG(record.abi == pack::kAbiSm90TmaV1, "facts: abi '", text("abi"),
               "' is not a CUDA kernel's (have: sm90_tma_v1)");
  record.dtype = number_of(kDtypeNames, "dtype", text("dtype"));
  record.layout = number_of(kLayoutNames, "layout", text("layout"));
  record.accumulate = number_of(kAccumulateNames, "accumulate", text("accumulate"));
  record.epilogue = number_of(kEpilogueNames, "epilogue", text("epilogue"));
  for (const NumericFact& fact : kNumericFacts) {
    KT_CHECK_ARG(facts.contains(fact.name), "facts: ", fact.name, " is missing; pass KernelFacts.to_dict()");
    record.*fact.field = facts[fact.name].cast<uint32_t>();
  }
  KT_CHECK_ARG(record.tile_m > 0 && record.tile_n > 0 && record.threads > 0 && record.threads <= 1024,
               "facts: tile ", record.tile_m, "x", record.tile_n, " with ", record.threads,
               " threads cannot be launched");
  return record;
}

// A kernel outside any pack, as the tuner launches it.
class PyCudaKernel {
 public:
  PyCudaKernel(const py::bytes& image, py::dict facts)
      : image_(image),
        facts_(std::move(facts)),
        kernel_(py::str(facts_["name"]), py::str(facts_["symbol"]), record_from(facts_),
                reinterpret_cast<const uint8_t*>(image_.data()), image_.size(), false) {
    KT_CHECK_ARG(!image_.empty(), "CudaKernel: the image is empty");
  }

  void launch(uint64_t a, uint64_t b, uint64_t c, int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb,
              int64_t ldc, uint32_t group_m, uint32_t split_k, int device, uint64_t stream) {
    constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
    KT_CHECK_ARG(m >= 1 && n >= 1 && k >= 1 && m <= kMax && n <= kMax && k <= kMax,
                 "launch: m, n and k must be in 1..", kMax, ", got ", m, ", ", n, ", ", k);
    KT_CHECK_ARG(lda >= 1 && ldb >= 1 && ldc >= n,
                 "launch: row strides must be positive and ldc at least n, got ", lda, ", ", ldb, ", ", ldc);
    KT_CHECK_ARG(split_k == 1, "launch: sm90_tma_v1 has no split_k, got ", split_k);
    const GemmOperands operands = {
        a, b, c, lda, ldb, ldc, static_cast<uint32_t>(m), static_cast<uint32_t>(n), static_cast<uint32_t>(k)};
    std::string reason;
    bool first_time = false;
    CudaKernel::Result result;
    {
      py::gil_scoped_release release;
      result =
          kernel_.launch(operands, group_m, device, reinterpret_cast<void*>(stream), &reason, &first_time);
    }
    if (result != CudaKernel::Result::ok) throw std::runtime_error(reason);
  }

  const py::dict& facts() const { return facts_; }

 private:
  std::string image_;
  py::dict facts_;
  CudaKernel kernel_;
};

py::dict device_dict(int ordinal) {
  std::string reason;
  const driver::DeviceInfo* info = driver::device(ordinal, &reason);
  if (info == nullptr) throw std::runtime_error(reason);
  py::dict result;
  result["name"] = info->name;
  result["cc_major"] = info->cc_major;
  result["cc_minor"] = info->cc_minor;
  result["sm_count"] = info->sm_count;
  result["l2_bytes"] = info->l2_bytes;
  result["smem_optin_bytes"] = info->smem_optin_bytes;
  result["driver_version"] = driver::driver_version();
  return result;
}

}  // namespace

void bind_driver(py::module_& module) {
  module.def(
      "cuda_status", [] { return path_text(driver::status()); },
      "Why CUDA cannot be used; empty when it can.");
  module.def("cuda_device_count", &driver::device_count);
  module.def("cuda_device", &device_dict, py::arg("ordinal"));
  module.def("set_libcuda", &driver::set_library, py::arg("path"));
  py::class_<PyCudaKernel>(module, "CudaKernel")
      .def(py::init<py::bytes, py::dict>(), py::arg("image"), py::arg("facts"))
      .def("launch", &PyCudaKernel::launch, py::arg("a"), py::arg("b"), py::arg("c"), py::arg("m"),
           py::arg("n"), py::arg("k"), py::arg("lda"), py::arg("ldb"), py::arg("ldc"), py::arg("group_m"),
           py::arg("split_k"), py::arg("device"), py::arg("stream"))
      .def_property_readonly("facts", &PyCudaKernel::facts);
}

}  // namespace ktlib
