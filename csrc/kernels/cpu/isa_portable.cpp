// The CPU family for any machine. Compile with -O3 -ffp-contract=fast and no -m flags.
#define KTLIB_CPU_LANES 4
#include "kernels/cpu/cpu_gemm_kernel.hpp"

namespace ktlib {
CpuLevel cpu_level_portable() { return kLevel; }
}  // namespace ktlib
