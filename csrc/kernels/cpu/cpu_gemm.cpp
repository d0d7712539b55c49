#include "kernels/cpu/cpu_gemm.hpp"

#include <cstdlib>
#include <memory>
#include <unordered_map>
#include <utility>

#include "common/problem.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ktlib {
namespace {

static_assert(static_cast<int>(Layout::nn) == 0 && static_cast<int>(Layout::nt) == 1 &&
                  static_cast<int>(Layout::tn) == 2 && static_cast<int>(Layout::tt) == 3,
              "kernels take bit 1 of the layout as A transposed and bit 0 as B transposed");

#if defined(__x86_64__)
// The features of x86-64-v3. __builtin_cpu_supports also asks the operating system (XGETBV) for AVX and
// AVX-512; F16C, MOVBE and LZCNT are read here because older compilers do not know their names.
bool machine_runs_v3() {
  __builtin_cpu_init();
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
  const bool f16c = (ecx >> 29 & 1) != 0, movbe = (ecx >> 22 & 1) != 0;
  if (!__get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx)) return false;
  const bool lzcnt = (ecx >> 5 & 1) != 0;
  return f16c && movbe && lzcnt && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

bool machine_runs_v4() {
  return machine_runs_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#else
bool machine_runs_v3() { return false; }
bool machine_runs_v4() { return false; }
#endif

std::vector<std::pair<std::string, CpuLevel>> runnable_levels() {
  std::vector<std::pair<std::string, CpuLevel>> levels;
  // A level without instances was built by a compiler that lacks its flags.
  if (machine_runs_v4() && cpu_level_v4().count > 0) levels.emplace_back("cpu-x86_64_v4", cpu_level_v4());
  if (machine_runs_v3() && cpu_level_v3().count > 0) levels.emplace_back("cpu-x86_64_v3", cpu_level_v3());
  levels.emplace_back("cpu-portable", cpu_level_portable());
  return levels;
}

std::string variant_name(const CpuInstance& instance, const std::string& arch) {
  return std::string("cpu_gemm/dtype=") + instance.dtype + ",loop=" + instance.loop +
         ",tile_m=" + std::to_string(instance.tile_m) + ",tile_n=" + std::to_string(instance.tile_n) +
         ",unroll=" + std::to_string(instance.unroll) + "/" + arch;
}

struct Free {
  void operator()(float* p) const { std::free(p); }
};

}  // namespace

const std::vector<std::string>& cpu_archs() {
  static const std::vector<std::string> archs = [] {
    std::vector<std::string> names;
    for (const auto& level : runnable_levels()) names.push_back(level.first);
    return names;
  }();
  return archs;
}

CpuGemmFn find_cpu_kernel(const std::string& name) {
  static const std::unordered_map<std::string, CpuGemmFn> kernels = [] {
    std::unordered_map<std::string, CpuGemmFn> by_name;
    for (const auto& [arch, level] : runnable_levels()) {
      for (int i = 0; i < level.count; ++i) {
        by_name.emplace(variant_name(level.instances[i], arch), level.instances[i].fn);
      }
    }
    return by_name;
  }();
  const auto found = kernels.find(name);
  return found == kernels.end() ? nullptr : found->second;
}

CpuLevel cpu_configs() { return cpu_level_portable(); }

float* cpu_workspace() noexcept {
  static thread_local std::unique_ptr<float, Free> workspace;
  if (!workspace) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, kCpuWorkspaceFloats * sizeof(float)) != 0) return nullptr;
    workspace.reset(static_cast<float*>(memory));
  }
  return workspace.get();
}

}  // namespace ktlib
