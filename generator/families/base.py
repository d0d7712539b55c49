"""What a kernel family is: its parameters, its constraints with reasons, and the facts a launch needs.

Must not build, time or look at the machine it runs on; the device comes in as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ktlib.problem import Problem
from ktlib_generator.values import Binary, ParameterValue, Variant


@dataclass(frozen=True)
class Device:
    """What a family and a search may know about a device. `arch` is `sm90a` or `cpu-x86_64_v3`."""

    kind: str
    name: str
    arch: str
    sm_count: int
    smem_optin_bytes: int = 0
    l2_bytes: int = 0

    @property
    def profile(self) -> str:
        """Name of this device's database: `sm90a-132`; a CPU's is its arch."""
        return self.arch if self.kind == "cpu" else f"{self.arch}-{self.sm_count}"


@dataclass(frozen=True)
class Parameter:
    """A tunable axis: its name, the values it may take in order, and what it means."""

    name: str
    values: tuple[ParameterValue, ...]
    meaning: str


@dataclass(frozen=True)
class Constraint:
    """A rule over a variant, a problem and a device, with the reason it exists."""

    reason: str
    holds: Callable[[Variant, Problem, Device], bool]


@dataclass(frozen=True)
class BuildRequest:
    """Everything a compiler needs, so that its fingerprint names the binary before it exists."""

    source: Path
    symbol: str
    arch: str
    defines: tuple[tuple[str, str], ...]
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class KernelFacts:
    """What the launcher and the pack must know of a compiled kernel; see csrc/pack/format.hpp.

    Sizes are elements unless the name says bytes; boxes are those of the tensor maps, inner
    dimension first (zero where the kernel takes no map). `layout` `any` means the kernel reads all four.
    """

    name: str
    symbol: str
    family: str
    abi: str
    arch: str
    dtype: str
    layout: str
    accumulate: str = "fp32"
    epilogue: str = "none"
    tile_m: int = 0
    tile_n: int = 0
    tile_k: int = 0
    threads: int = 0
    cluster_m: int = 1
    cluster_n: int = 1
    smem_bytes: int = 0
    ctas_per_sm: int = 1
    persistent: int = 0
    min_align_bytes: int = 1
    a_box_inner: int = 0
    a_box_outer: int = 0
    b_box_inner: int = 0
    b_box_outer: int = 0
    c_box_inner: int = 0
    c_box_outer: int = 0
    swizzle_bytes: int = 0
    registers: int = 0
    num_stages: int = 0
    spill_bytes: int = 0
    k_multiple: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, as `_core.CudaKernel` and the pack writer take them."""
        return asdict(self)


@dataclass(frozen=True)
class LaunchParameters:
    """Run-time parameters of one launch, stored with the entry rather than compiled in."""

    group_m: int = 1
    split_k: int = 1


class Family(Protocol):
    """A parametrised kernel source with its space. `device_kind` is `cuda` or `cpu`."""

    name: str
    device_kind: str

    def parameters(self) -> tuple[Parameter, ...]:
        """Every tunable axis, in a fixed order."""
        ...

    def constraints(self) -> tuple[Constraint, ...]:
        """Every rule that prunes the space."""
        ...

    def variants(self, problem: Problem, device: Device) -> Iterator[Variant]:
        """Every legal variant for a problem, in a fixed order; none when the family cannot serve it."""
        ...

    def build_request(self, variant: Variant) -> BuildRequest | None:
        """What to compile; None when the kernel is compiled into the extension."""
        ...

    def kernel_facts(self, variant: Variant, binary: Binary) -> KernelFacts:
        """Facts of the compiled kernel; run-time parameters of the variant do not take part."""
        ...

    def launch_parameters(self, variant: Variant) -> LaunchParameters:
        """The variant's run-time parameters."""
        ...


def refusals(family: Family, variant: Variant, problem: Problem, device: Device) -> tuple[str, ...]:
    """Return the reasons this variant is illegal for the problem; empty when it is legal."""
    return tuple(c.reason for c in family.constraints() if not c.holds(variant, problem, device))


def legal_variants(
    family: Family,
    arch: str,
    fixed: Mapping[str, ParameterValue],
    problem: Problem,
    device: Device,
) -> Iterator[Variant]:
    """Walk the product of the family's parameters in order and yield the legal variants.

    `fixed` gives parameters that the problem decides (dtype, layout); they are not walked.
    """
    import itertools

    axes = [p for p in family.parameters() if p.name not in fixed]
    for values in itertools.product(*(axis.values for axis in axes)):
        config = dict(fixed) | {axis.name: value for axis, value in zip(axes, values, strict=True)}
        variant = Variant.make(family.name, arch, **config)
        if not refusals(family, variant, problem, device):
            yield variant
