"""What has to be right before a run starts; each refusal says what to change.

Must not write anything: a run that is refused leaves no file or folder behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ktlib.problem import Problem
from ktlib_generator.families.base import Device, Family, refusals
from ktlib_generator.measure.timer import PROTOCOLS
from ktlib_generator.progress import counted, unserved_text
from ktlib_generator.values import Record, Variant

# Every legal variant of a problem with its family, in a fixed order; empty where no family serves it.
Space = Mapping[Variant, Family]


class TuneError(ValueError):
    """The run cannot start as asked; the message says what to change."""


def protocol_for(device: Device, wanted: str = "") -> str:
    """Return the timing protocol to use: the wanted one, or the first of the device's kind.

    Raises:
        TuneError: the device's kind has no such protocol.
    """
    have = PROTOCOLS[device.kind]
    if wanted and wanted not in have:
        raise TuneError(f"protocol {wanted!r} is unknown for {device.profile} (have: {', '.join(have)})")
    return wanted or have[0]


def require_one_protocol(
    history: Iterable[Record], problems: Iterable[Problem], protocol: str, run_dir: Path
) -> None:
    """Refuse to go on with a problem that was timed under another protocol.

    The winner of a problem is picked among all its records, and times of two protocols do not compare.

    Raises:
        TuneError: naming both protocols.
    """
    wanted = set(problems)
    timed = [r.measurement.protocol for r in history if r.problem in wanted and r.measurement is not None]
    others = sorted(set(timed) - {protocol})
    if others:
        count = counted(sum(found != protocol for found in timed), "trial")
        raise TuneError(
            f"{run_dir} holds {count} of these problems timed by {', '.join(others)}, this run is for "
            f"{protocol}; times of two protocols do not compare. Give --protocol {others[0]} to go on with "
            "them, or another --run-dir and --database to start anew"
        )


def spaces_of(
    families: Sequence[Family], problems: Iterable[Problem], device: Device
) -> dict[Problem, dict[Variant, Family]]:
    """Return the space of each problem.

    Raises:
        TuneError: all of them are empty; with the families' reasons.
    """
    spaces = {
        problem: {variant: family for family in families for variant in family.variants(problem, device)}
        for problem in problems
    }
    if not any(spaces.values()):
        unserved = {problem: why_unserved(families, problem, device) for problem in spaces}
        raise TuneError(
            f"nothing to tune on {device.profile}: no kernel family serves {unserved_text(unserved)}"
        )
    return spaces


def why_unserved(families: Sequence[Family], problem: Problem, device: Device) -> str:
    """Return each family's reasons for having no variant: the rules that its least illegal one breaks."""
    return "; ".join(f"{family.name}: {_least_broken(family, problem, device)}" for family in families)


def needs_compiler(spaces: Mapping[Problem, Space]) -> bool:
    """Say whether any candidate has to be compiled at all (a kernel in the extension has not)."""
    return any(
        family.build_request(variant) is not None
        for space in spaces.values()
        for variant, family in space.items()
    )


def _least_broken(family: Family, problem: Problem, device: Device) -> str:
    axes = family.parameters()
    least: tuple[str, ...] | None = None
    for values in itertools.product(*(axis.values for axis in axes)):
        config = {axis.name: value for axis, value in zip(axes, values, strict=True)}
        broken = refusals(family, Variant.make(family.name, device.arch, **config), problem, device)
        if least is None or len(broken) < len(least):
            least = broken
        if len(least) <= 1:
            break
    return ", ".join(least or ()) or "no legal variant"
