// The CPU family for x86-64-v4 (AVX-512 F, BW, CD, DQ, VL). Compile with -O3 -ffp-contract=fast
// -march=x86-64-v4 on x86-64; without that flag, or on another machine, it offers no instance and cpu_archs()
// leaves the level out.
#include "kernels/cpu/cpu_instances.hpp"

#if defined(__x86_64__) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && defined(__FMA__) && defined(__F16C__)
#define KTLIB_CPU_LANES 16
#include "kernels/cpu/cpu_gemm_kernel.hpp"

namespace ktlib {
CpuLevel cpu_level_v4() { return kLevel; }
}  // namespace ktlib
#else
namespace ktlib {
CpuLevel cpu_level_v4() { return {nullptr, 0}; }
}  // namespace ktlib
#endif
