// `ktlib._core`'s view of the CPU family: list it, run one kernel on raw addresses, time it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "common/problem.hpp"
#include "kernels/cpu/cpu_gemm.hpp"

namespace py = pybind11;

namespace ktlib {
namespace {

constexpr int64_t kMaxExtent = 0x7FFFFFFF;
constexpr int64_t kReleaseGilAbove =
    1 << 18;  // multiply-adds; below about 10 us handing the lock over costs more

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

int parse_dtype(const std::string& text) {
  for (int i = 0; i < 3; ++i) {
    if (text == kDtypeNames[i]) return i;
  }
  throw py::value_error("cpu kernel: dtype '" + text + "' is unknown (have: fp16, bf16, fp32)");
}

int parse_layout(const std::string& text) {
  for (int i = 0; i < 4; ++i) {
    if (text == kLayoutNames[i]) return i;
  }
  throw py::value_error("cpu kernel: layout '" + text + "' is unknown (have: nn, nt, tn, tt)");
}

// Extents and row strides of one product, checked before any address is believed.
struct Extents {
  int64_t m, n, k, lda, ldb, ldc;
  int layout;

  Extents(int64_t m_, int64_t n_, int64_t k_, int64_t lda_, int64_t ldb_, int64_t ldc_,
          const std::string& text)
      : m(m_), n(n_), k(k_), lda(lda_), ldb(ldb_), ldc(ldc_), layout(parse_layout(text)) {
    extent("m", m), extent("n", n), extent("k", k);
    const bool a_transposed = (layout & 2) != 0, b_transposed = (layout & 1) != 0;
    stride("lda", lda, a_transposed ? m : k), stride("ldb", ldb, b_transposed ? k : n), stride("ldc", ldc, n);
  }

  static void extent(const char* name, int64_t value) {
    if (value >= 0 && value <= kMaxExtent) return;
    throw py::value_error(std::string("cpu kernel: ") + name + " must be in 0.." +
                          std::to_string(kMaxExtent) + ", got " + std::to_string(value));
  }

  static void stride(const char* name, int64_t value, int64_t width) {
    if (value >= width && value < int64_t{1} << 40) return;
    throw py::value_error(std::string("cpu kernel: ") + name + " must be at least the row's " +
                          std::to_string(width) + " elements and below 2^40, got " + std::to_string(value));
  }
};

class CpuKernel {
 public:
  explicit CpuKernel(const std::string& name) : name_(name), fn_(find_cpu_kernel(name)) {
    if (fn_ == nullptr) {
      throw py::value_error(
          "cpu kernel '" + name + "' is not in this extension (archs of this machine: " + join(cpu_archs()) +
          "; configurations: ktlib._core.cpu_kernels(); for example " +
          "cpu_gemm/dtype=fp32,loop=mn,tile_m=4,tile_n=16,unroll=1/" + cpu_archs().front() + ")");
    }
    const size_t from = name.find("dtype=") + 6;
    dtype_ = parse_dtype(name.substr(from, name.find(',', from) - from));
  }

  static CpuKernel from_address(uintptr_t address, const std::string& dtype) {
    if (address == 0) throw py::value_error("cpu kernel: address is null; pass the symbol's address");
    return CpuKernel(reinterpret_cast<CpuGemmFn>(address), parse_dtype(dtype));
  }

  const std::string& name() const { return name_; }
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(fn_); }
  std::string dtype() const { return kDtypeNames[dtype_]; }

  void run(uintptr_t a, uintptr_t b, uintptr_t c, int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb,
           int64_t ldc, const std::string& layout) const {
    const Extents e(m, n, k, lda, ldb, ldc, layout);
    check_addresses(e, a, b, c);
    if (m * n > kReleaseGilAbove || m * n * k > kReleaseGilAbove) {
      py::gil_scoped_release release;
      call(e, a, b, c);
    } else {
      call(e, a, b, c);
    }
  }

  int64_t time_ns(const std::vector<uintptr_t>& a, const std::vector<uintptr_t>& b,
                  const std::vector<uintptr_t>& c, int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb,
                  int64_t ldc, const std::string& layout, int64_t calls) const {
    const Extents e(m, n, k, lda, ldb, ldc, layout);
    if (calls < 1)
      throw py::value_error("cpu kernel: calls must be at least 1, got " + std::to_string(calls));
    if (a.empty() || a.size() != b.size() || a.size() != c.size()) {
      throw py::value_error(
          "cpu kernel: a, b and c must list the same number of addresses, at least one; got " +
          std::to_string(a.size()) + ", " + std::to_string(b.size()) + ", " + std::to_string(c.size()));
    }
    for (size_t i = 0; i < a.size(); ++i) check_addresses(e, a[i], b[i], c[i]);
    py::gil_scoped_release release;
    const auto start = std::chrono::steady_clock::now();
    for (size_t set = 0; calls > 0; --calls) {
      call(e, a[set], b[set], c[set]);
      if (++set == a.size()) set = 0;
    }
    const auto stop = std::chrono::steady_clock::now();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(stop - start).count();
  }

 private:
  CpuKernel(CpuGemmFn fn, int dtype) : fn_(fn), dtype_(dtype) {}

  void call(const Extents& e, uintptr_t a, uintptr_t b, uintptr_t c) const {
    fn_(reinterpret_cast<const void*>(a), reinterpret_cast<const void*>(b), reinterpret_cast<void*>(c), e.m,
        e.n, e.k, e.lda, e.ldb, e.ldc, e.layout);
  }

  void check_addresses(const Extents& e, uintptr_t a, uintptr_t b, uintptr_t c) const {
    const bool writes = e.m > 0 && e.n > 0,
               reads = writes && e.k > 0;  // an empty matrix may be a null address
    check_address("a", a, reads), check_address("b", b, reads), check_address("c", c, writes);
  }

  void check_address(const char* name, uintptr_t address, bool needed) const {
    const uint32_t bytes = element_bytes(static_cast<Dtype>(dtype_));
    if (needed && address == 0)
      throw py::value_error(std::string("cpu kernel: address of ") + name + " is null");
    if (address % bytes != 0) {
      throw py::value_error(std::string("cpu kernel: address of ") + name + " must be a multiple of " +
                            std::to_string(bytes) + " bytes for " + dtype() + ", got " +
                            std::to_string(address));
    }
  }

  std::string name_;
  CpuGemmFn fn_ = nullptr;
  int dtype_ = 0;
};

py::list list_kernels() {
  py::list kernels;
  const CpuLevel level = cpu_configs();
  for (int i = 0; i < level.count; ++i) {
    const CpuInstance& instance = level.instances[i];
    py::dict config;
    config["tile_m"] = instance.tile_m;
    config["tile_n"] = instance.tile_n;
    config["unroll"] = instance.unroll;
    config["loop"] = instance.loop;
    config["dtype"] = instance.dtype;
    kernels.append(config);
  }
  return kernels;
}

}  // namespace

void bind_cpu(py::module_& module) {
  using py::arg;
  module.def("cpu_archs", &cpu_archs, "ISA levels this machine runs, best first.");
  module.def("cpu_kernels", &list_kernels, "Configurations of the CPU family; every level has all of them.");
  py::class_<CpuKernel>(module, "CpuKernel", "One kernel of the CPU family, called on raw addresses.")
      .def(py::init<const std::string&>(), arg("variant"))
      .def_static("from_address", &CpuKernel::from_address, arg("address"), arg("dtype"),
                  "A kernel of ABI cpu_gemm_v1 outside the extension. The caller keeps its library loaded.")
      .def_property_readonly("name", &CpuKernel::name)
      .def_property_readonly("address", &CpuKernel::address,
                             "Where the kernel's code is, as from_address takes it.")
      .def_property_readonly("dtype", &CpuKernel::dtype)
      .def("run", &CpuKernel::run, arg("a"), arg("b"), arg("c"), arg("m"), arg("n"), arg("k"), arg("lda"),
           arg("ldb"), arg("ldc"), arg("layout"),
           "Compute C = A B; strides in elements. The caller vouches for the addresses.")
      .def("time_ns", &CpuKernel::time_ns, arg("a"), arg("b"), arg("c"), arg("m"), arg("n"), arg("k"),
           arg("lda"), arg("ldb"), arg("ldc"), arg("layout"), arg("calls"),
           "Nanoseconds of `calls` calls back to back, rotating over the lists of addresses.");
}

}  // namespace ktlib
