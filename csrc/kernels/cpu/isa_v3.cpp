// The CPU family for x86-64-v3 (AVX2, FMA, F16C). Compile with -O3 -ffp-contract=fast -march=x86-64-v3 on
// x86-64; without that flag, or on another machine, it offers no instance and cpu_archs() leaves the level
// out.
#include "kernels/cpu/cpu_instances.hpp"

#if defined(__x86_64__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KTLIB_CPU_LANES 8
#include "kernels/cpu/cpu_gemm_kernel.hpp"

namespace ktlib {
CpuLevel cpu_level_v3() { return kLevel; }
}  // namespace ktlib
#else
namespace ktlib {
CpuLevel cpu_level_v3() { return {nullptr, 0}; }
}  // namespace ktlib
#endif
