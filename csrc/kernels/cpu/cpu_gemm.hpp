// The CPU family's registry: which ISA levels this machine runs and the kernel of each variant name.
//
// Compile flags by file (the levels differ on purpose; see cpu_gemm_kernel.hpp for why they never mix):
//   isa_v4.cpp        -O3 -ffp-contract=fast -march=x86-64-v4   (x86-64 only; elsewhere no flags, it is then
//   empty) isa_v3.cpp        -O3 -ffp-contract=fast -march=x86-64-v3   (the same) isa_portable.cpp  -O3
//   -ffp-contract=fast cpu_gemm.cpp bind_cpu.cpp   the extension's common flags, never an -m flag
#pragma once

#include <string>
#include <vector>

#include "kernels/cpu/cpu_instances.hpp"

namespace ktlib {

// Levels this machine and its operating system run, best first: cpu-x86_64_v4, cpu-x86_64_v3, cpu-portable.
const std::vector<std::string>& cpu_archs();

// Kernel of a variant's text, `cpu_gemm/dtype=fp32,loop=mn,tile_m=4,tile_n=16,unroll=1/cpu-x86_64_v4`; null
// when no such instance exists or this machine cannot run its level. Thread-safe; a hash look-up.
CpuGemmFn find_cpu_kernel(const std::string& variant_name);

// Every instance of one level (they have the same configurations), for listing.
CpuLevel cpu_configs();

}  // namespace ktlib
