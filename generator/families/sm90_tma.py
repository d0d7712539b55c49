"""The Hopper family: csrc/kernels/sm90/gemm_tma.cu over its tiles, stages, schedules and raster.

Must not compile or launch; it says what to compile and what a launch needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ktlib.problem import Problem
from ktlib_generator.build.sources import kernel_sources
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

ARCH = "sm90a"
TILE_K = 64
SMEM_PER_SM_BYTES = 228 * 1024
SMEM_PER_CTA_BYTES = 227 * 1024
SMEM_RESERVED_BYTES = 1024  # the driver keeps this much of every CTA's share
BLOCK_BYTES = 64 * 64 * 2  # a block of C on its way out


@dataclass(frozen=True)
class Tile:
    """A tile that the source is written for, with the CTAs a SM that its registers allow."""

    m: int
    n: int
    schedule: str
    max_ctas_per_sm: int

    @property
    def threads(self) -> int:
        """Consumer warp groups, and a producer warp or warp group."""
        return 128 * (self.m // 64) + (128 if self.schedule == "coop" else 32)

    def smem_bytes(self, num_stages: int) -> int:
        """Dynamic shared memory, as Config::kSharedBytes in the source."""
        ring = num_stages * (self.m + self.n) * TILE_K * 2
        blocks = (self.m // 64) * min(2, self.n // 64) * BLOCK_BYTES
        return ring + (blocks if self.schedule == "coop" else 0) + 2 * num_stages * 8

    def ctas_per_sm(self, num_stages: int) -> int:
        """CTAs of this tile that a SM holds at once."""
        fit = SMEM_PER_SM_BYTES // (self.smem_bytes(num_stages) + SMEM_RESERVED_BYTES)
        return max(1, min(self.max_ctas_per_sm, fit))


TILES = (
    Tile(64, 64, "single", 4),
    Tile(64, 128, "single", 3),
    Tile(128, 128, "single", 2),
    Tile(128, 256, "coop", 1),
)


def _tile(variant: Variant) -> Tile | None:
    for tile in TILES:
        if (tile.m, tile.n, tile.schedule) == (variant["tile_m"], variant["tile_n"], variant["schedule"]):
            return tile
    return None


def _fits(variant: Variant, problem: Problem, device: Device) -> bool:
    tile = _tile(variant)
    limit = device.smem_optin_bytes or SMEM_PER_CTA_BYTES
    return tile is None or tile.smem_bytes(variant.integer("num_stages")) <= limit


def _stages_are_used(variant: Variant, problem: Problem, device: Device) -> bool:
    tile = _tile(variant)
    if tile is None or tile.schedule == "coop":
        return True
    k_blocks = -(-problem.k // TILE_K)
    stages = [int(s) for s in _AXES["num_stages"].values]
    return all(s >= variant.integer("num_stages") or s < k_blocks for s in stages)


def _raster_matters(variant: Variant, problem: Problem, device: Device) -> bool:
    tiles_m = -(-problem.m // variant.integer("tile_m"))
    groups = [int(g) for g in _AXES["group_m"].values]
    return all(g >= variant.integer("group_m") or g < tiles_m for g in groups)


_AXES = {
    parameter.name: parameter
    for parameter in (
        Parameter("tile_m", (64, 128), "rows of C a CTA computes at a time"),
        Parameter("tile_n", (64, 128, 256), "columns of C a CTA computes at a time"),
        Parameter("tile_k", (TILE_K,), "K a stage holds: one 128-byte swizzle row"),
        Parameter("num_stages", (3, 4, 6, 8), "stages of the shared-memory ring"),
        Parameter("schedule", ("single", "coop"), "one tile a CTA, or persistent with two consumer groups"),
        Parameter("group_m", (1, 4, 8, 16), "raster: tiles of M that share B in L2; given at run time"),
        Parameter("layout", ("nn", "nt"), "storage of A and B; the problem decides"),
        Parameter("dtype", ("fp16", "bf16"), "operands and C; the problem decides"),
    )
}


class Sm90Tma:
    """TMA + mbarrier + wgmma with fp32 accumulation (arch sm90a)."""

    name = "sm90_tma"
    device_kind = "cuda"

    def parameters(self) -> tuple[Parameter, ...]:
        """Every tunable axis, in a fixed order."""
        return tuple(_AXES.values())

    def constraints(self) -> tuple[Constraint, ...]:
        """Every rule that prunes the space."""
        return (
            Constraint("sm90a code runs on sm90a devices alone", lambda v, p, d: v.arch == d.arch == ARCH),
            Constraint(
                "the kernel reads A row-major, B row-major or transposed (nn, nt)",
                lambda v, p, d: p.layout == v["layout"] and p.layout in ("nn", "nt"),
            ),
            Constraint(
                "tensor cores take fp16 and bf16 here, accumulating in fp32",
                lambda v, p, d: p.dtype == v["dtype"] and p.dtype != "fp32" and p.accumulate == "fp32",
            ),
            Constraint("batches are not implemented", lambda v, p, d: p.batch == 1),
            Constraint("an empty product needs no kernel", lambda v, p, d: min(p.m, p.n, p.k) > 0),
            Constraint(
                "TMA needs 16-byte aligned addresses and row strides", lambda v, p, d: _tma_can_read(p)
            ),
            Constraint(
                "the source is written for this tile and schedule", lambda v, p, d: _tile(v) is not None
            ),
            Constraint("the ring and the C blocks fit in a CTA's shared memory", _fits),
            Constraint("a deeper ring than K has blocks only costs occupancy", _stages_are_used),
            Constraint("a larger group than there are tiles of M is the same raster", _raster_matters),
        )

    def variants(self, problem: Problem, device: Device) -> Iterator[Variant]:
        """Every legal variant for a problem, in a fixed order."""
        if problem.layout not in ("nn", "nt") or problem.dtype == "fp32" or device.kind != "cuda":
            return iter(())
        fixed = {"layout": problem.layout, "dtype": problem.dtype}
        return legal_variants(self, ARCH, fixed, problem, device)

    def build_request(self, variant: Variant) -> BuildRequest:
        """What nvcc compiles; the run-time parameter group_m does not take part."""
        tile = self._require_tile(variant)
        stages = variant.integer("num_stages")
        symbol = (
            f"ktlib_sm90_tma_{tile.m}x{tile.n}x{TILE_K}_s{stages}_{tile.schedule}"
            f"_{variant['layout']}_{variant['dtype']}"
        )
        defines = {
            "KT_TILE_M": str(tile.m),
            "KT_TILE_N": str(tile.n),
            "KT_STAGES": str(stages),
            "KT_COOP": str(int(tile.schedule == "coop")),
            "KT_CTAS_PER_SM": str(tile.ctas_per_sm(stages)),
            "KT_B_ROW_MAJOR": str(int(variant["layout"] == "nn")),
            "KT_BF16": str(int(variant["dtype"] == "bf16")),
            "KT_SYMBOL": symbol,
        }
        source = kernel_sources() / "sm90" / "gemm_tma.cu"
        return BuildRequest(source, symbol, ARCH, tuple(sorted(defines.items())))

    def kernel_facts(self, variant: Variant, binary: Binary) -> KernelFacts:
        """What the launcher needs; the name leaves out group_m, which one cubin takes at run time."""
        tile = self._require_tile(variant)
        stages = variant.integer("num_stages")
        row_major_b = variant["layout"] == "nn"
        compiled = Variant(
            self.name, tuple(pair for pair in variant.config if pair[0] != "group_m"), variant.arch
        )
        return KernelFacts(
            name=str(compiled),
            symbol=binary.symbol,
            family=self.name,
            abi="sm90_tma_v1",
            arch=ARCH,
            dtype=str(variant["dtype"]),
            layout=str(variant["layout"]),
            tile_m=tile.m,
            tile_n=tile.n,
            tile_k=TILE_K,
            threads=tile.threads,
            smem_bytes=tile.smem_bytes(stages),
            ctas_per_sm=tile.ctas_per_sm(stages),
            persistent=int(tile.schedule == "coop"),
            min_align_bytes=16,
            a_box_inner=TILE_K,
            a_box_outer=tile.m,
            b_box_inner=64 if row_major_b else TILE_K,
            b_box_outer=TILE_K if row_major_b else tile.n,
            c_box_inner=64,
            c_box_outer=64,
            swizzle_bytes=128,
            registers=binary.registers,
            num_stages=stages,
            spill_bytes=binary.spill_bytes,
        )

    def launch_parameters(self, variant: Variant) -> LaunchParameters:
        """The raster group."""
        return LaunchParameters(group_m=variant.integer("group_m"))

    def _require_tile(self, variant: Variant) -> Tile:
        tile = _tile(variant)
        if tile is None:
            have = ", ".join(f"{t.m}x{t.n} {t.schedule}" for t in TILES)
            raise ValueError(f"{variant}: gemm_tma.cu has no such tile and schedule (have: {have})")
        return tile


def _tma_can_read(problem: Problem) -> bool:
    # Problem.align counts C too, but C may be stored plainly; TMA needs A's and B's strides.
    if problem.align == 16:
        return True
    if problem.align != problem.contiguous_align:
        return False
    ldb = problem.n if problem.layout[1] == "n" else problem.k
    return problem.k % 8 == 0 and ldb % 8 == 0
