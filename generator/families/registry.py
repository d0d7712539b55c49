"""Every kernel family, in one tuple. Adding a family is adding its line here.

Must not decide anything between families; that is the search's and the pack's work.
"""

from __future__ import annotations

from ktlib_generator.families.base import Device, Family
from ktlib_generator.families.cpu_gemm import CpuGemm
from ktlib_generator.families.sm90_tma import Sm90Tma

FAMILIES: tuple[Family, ...] = (Sm90Tma(), CpuGemm())


def family(name: str) -> Family:
    """Return the family of this name.

    Raises:
        ValueError: no such family; lists those there are.
    """
    for candidate in FAMILIES:
        if candidate.name == name:
            return candidate
    have = ", ".join(candidate.name for candidate in FAMILIES)
    raise ValueError(f"family {name!r} is unknown (have: {have})")


def families_for(device: Device) -> tuple[Family, ...]:
    """Return the families that run on this kind of device; whether one serves a problem, `variants` says."""
    return tuple(candidate for candidate in FAMILIES if candidate.device_kind == device.kind)
