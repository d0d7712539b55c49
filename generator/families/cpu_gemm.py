"""The family `cpu_gemm`: C++ template instances compiled into the extension: kernels without a GPU.

Must not build (the extension is built already) or look at the machine; the arch comes with the device.
"""

from __future__ import annotations

from collections.abc import Iterator

from ktlib.problem import Problem
from ktlib_generator.families.base import (
    BuildRequest,
    Constraint,
    Device,
    KernelFacts,
    LaunchParameters,
    Parameter,
    legal_variants,
)
from ktlib_generator.values import Binary, Variant

ARCHS = ("cpu-x86_64_v4", "cpu-x86_64_v3", "cpu-portable")
DTYPES = ("fp32", "fp16", "bf16")

# (tile_m, tile_n, unroll, loop), the same list as csrc/kernels/cpu/cpu_instances.hpp; a test compares them
# through `_core.cpu_kernels()`. From the narrowest (any problem) to what fills the registers of each arch.
INSTANCES = (
    (1, 8, 4, "mn"),
    (1, 32, 4, "mn"),
    (1, 64, 2, "mn"),
    (2, 16, 4, "mn"),
    (4, 8, 4, "mn"),
    (4, 16, 1, "mn"),
    (4, 16, 4, "nm"),
    (4, 32, 2, "mn"),
    (4, 64, 1, "mn"),
    (6, 16, 2, "mn"),
    (6, 16, 2, "nm"),
    (6, 64, 1, "nm"),
    (8, 8, 4, "mn"),
    (8, 16, 2, "mn"),
    (8, 32, 1, "mn"),
    (8, 32, 1, "nm"),
)

# Elements of C one tile may hold: vector registers less those for B and A, times lanes. `cpu-portable` has 4
# lanes; its 16 accumulators fit AArch64's 32 registers and spill a little from x86-64's 16.
TILE_LIMIT = {"cpu-x86_64_v4": 28 * 16, "cpu-x86_64_v3": 13 * 8, "cpu-portable": 16 * 4}

# Narrowest tile: always allowed, so that every problem has a variant.
_MIN_TILE_N = min(tile_n for _, tile_n, _, _ in INSTANCES)


class CpuGemm:
    """GEMM on one core: fp32, or halves accumulated in fp32; reads all four layouts and any row stride."""

    name = "cpu_gemm"
    device_kind = "cpu"
    abi = "cpu_gemm_v1"

    def parameters(self) -> tuple[Parameter, ...]:
        """Every tunable axis; the values are those some instance has."""
        return (
            Parameter("dtype", DTYPES, "type of A, B and C in memory"),
            Parameter("tile_m", _values(0), "rows of C whose accumulators stay in registers"),
            Parameter("tile_n", _values(1), "columns of C whose accumulators stay in registers"),
            Parameter("unroll", _values(2), "k steps in one turn of the inner loop"),
            Parameter("loop", ("mn", "nm"), "outer loop over tiles: rows (mn) or columns (nm)"),
        )

    def constraints(self) -> tuple[Constraint, ...]:
        """Every rule that prunes the space, with its reason."""
        return CONSTRAINTS

    def variants(self, problem: Problem, device: Device) -> Iterator[Variant]:
        """Every legal variant for the device's arch; at least one for every non-empty product of batch 1."""
        return legal_variants(self, device.arch, {"dtype": problem.dtype}, problem, device)

    def build_request(self, variant: Variant) -> BuildRequest | None:
        """Return None: every instance is part of the extension."""
        return None

    def kernel_facts(self, variant: Variant, binary: Binary) -> KernelFacts:
        """Facts of the instance; dispatch finds it by `name`, and `layout` says that it reads all four."""
        return KernelFacts(
            name=str(variant),
            symbol=binary.symbol,
            family=self.name,
            abi=self.abi,
            arch=variant.arch,
            dtype=str(variant["dtype"]),
            layout="any",
            tile_m=variant.integer("tile_m"),
            tile_n=variant.integer("tile_n"),
            threads=1,
        )

    def launch_parameters(self, variant: Variant) -> LaunchParameters:
        """Return the defaults: a CPU instance has no run-time parameters."""
        return LaunchParameters()


def _values(position: int) -> tuple[int, ...]:
    return tuple(sorted({int(instance[position]) for instance in INSTANCES}))


def _is_instance(variant: Variant) -> bool:
    return tuple(variant[name] for name in ("tile_m", "tile_n", "unroll", "loop")) in INSTANCES


def _fits_registers(variant: Variant, problem: Problem, device: Device) -> bool:
    return variant.integer("tile_m") * variant.integer("tile_n") <= TILE_LIMIT.get(variant.arch, 0)


def _order_matters(variant: Variant, problem: Problem, device: Device) -> bool:
    many = problem.m > variant.integer("tile_m") and problem.n > variant.integer("tile_n")
    return many or variant["loop"] == "mn" or not _has_twin(variant)


def _has_twin(variant: Variant) -> bool:
    """Whether the other loop order is an instance too."""
    return _is_instance(variant.replace(loop="mn")) and _is_instance(variant.replace(loop="nm"))


CONSTRAINTS = (
    Constraint(
        "the extension is compiled with this combination of tile, unroll and loop order",
        lambda v, p, d: _is_instance(v),
    ),
    Constraint(
        "the variant is compiled for the device's arch, and the device is a CPU",
        lambda v, p, d: d.kind == "cpu" and v.arch == d.arch and d.arch in ARCHS,
    ),
    Constraint("the variant reads the problem's dtype", lambda v, p, d: v["dtype"] == p.dtype),
    Constraint("the family accumulates in fp32 only", lambda v, p, d: p.accumulate == "fp32"),
    Constraint("the family has no epilogue", lambda v, p, d: p.epilogue == "none"),
    Constraint("one call computes one product (batch 1)", lambda v, p, d: p.batch == 1),
    Constraint("an empty product needs no kernel", lambda v, p, d: min(p.m, p.n, p.k) >= 1),
    Constraint(
        "a tile taller than twice the problem wastes more than half of its multiplications",
        lambda v, p, d: v.integer("tile_m") < 2 * p.m,
    ),
    Constraint(
        "a tile wider than twice the problem wastes more than half of its lanes (the narrowest may)",
        lambda v, p, d: v.integer("tile_n") < 2 * p.n or v["tile_n"] == _MIN_TILE_N,
    ),
    Constraint("the tile's accumulators fit the arch's vector registers", _fits_registers),
    Constraint("one row or column of tiles has one order, and loop mn stands for it", _order_matters),
)
