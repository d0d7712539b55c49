"""Choose each problem's winner from records (`pick_winner`) and write them as a pack (`write_pack`).

Must not measure, build or look at the machine it runs on; the bytes of the file are pack_file.py's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktlib.problem import ACCUMULATES, DTYPES, EPILOGUES, LAYOUTS, TIERS, Problem
from ktlib_generator.families.base import Device, KernelFacts, LaunchParameters
from ktlib_generator.pack_file import ENTRY, VENDOR_KERNEL, KernelTable, file_bytes, write_whole
from ktlib_generator.values import Binary, Record, Status, Variant

FactsOf = Callable[[Variant, Binary], tuple[KernelFacts, LaunchParameters]]


@dataclass(frozen=True)
class Policy:
    """When a kernel of ours may win, and which of those within noise of each other does.

    A kernel's gain is its baseline's time over its own, both from one interleaved run, held within `drift`
    of what the baseline's faster runs give: a machine that was busy for a moment slows the vendor too. The
    gain must exceed `min_gain`, which stands for what one run cannot see (H200: winners by
    less than 1.5% came out up to 2% behind when measured again), and `noise_factor` times the noise, the
    larger of the two measurements'. A record noisier than `max_noise` decides nothing. Kernels within
    `tie` of the best, or within its noise if that is less, are equal. Part of a pack's meta data.
    """

    noise_factor: float = 2.0
    min_gain: float = 0.015
    max_noise: float = 0.2
    drift: float = 0.03
    tie: float = 0.02

    def margin(self, record: Record) -> float:
        """Return the speed-up that `record` must exceed to win."""
        return 1.0 + max(self.min_gain, self.noise_factor * record_noise(record))


@dataclass(frozen=True)
class Winner:
    """What won a problem: `record` when a kernel of ours did, else the vendor.

    `latency_us`, `vendor_us` and `noise` are those of the best kernel of ours; `latency_us` is zero
    when none gave a right result.
    """

    problem: Problem
    record: Record | None
    latency_us: float
    vendor_us: float
    noise: float
    candidates: int


@dataclass(frozen=True)
class PackSummary:
    """What `write_pack` wrote. `unmeasured` are problems without any usable time, which get no entry."""

    path: Path
    entries: int
    wins: int
    kernels: int
    file_bytes: int
    unmeasured: tuple[Problem, ...] = field(default=())


def record_noise(record: Record) -> float:
    """Return the larger noise of a record's measurement and its baseline's."""
    return max((m.noise for m in (record.measurement, record.baseline) if m is not None), default=0.0)


def compiled_smem_bytes(record: Record) -> int:
    """Return the shared memory that the compiler reported for a record's kernel."""
    return 0 if record.binary is None else record.binary.smem_bytes


def pick_winner(
    records: Sequence[Record],
    policy: Policy,
    smem_bytes: Callable[[Record], int] = compiled_smem_bytes,
) -> Winner | None:
    """Choose between one problem's records; None when nothing usable was measured.

    Of a variant measured more than once the latest record counts, whatever its status. `policy` says what
    wins; between equals the smaller shared memory, then the name. Shared objects are candidates but
    never winners: a pack cannot carry them.

    Raises:
        ValueError: the records are of several problems or devices.
    """
    if not records:
        return None
    problem = records[0].problem
    kinds = {str(r.problem) for r in records} | {r.environment.profile for r in records}
    if len(kinds) != 2:
        raise ValueError(f"pick_winner: expected records of one problem on one device, got {sorted(kinds)}")
    latest: dict[Variant, Record] = {}
    for record in sorted(records, key=lambda r: r.measured_unix):
        latest[record.variant] = record
    right = [r for r in latest.values() if r.status is Status.OK]
    paired = _gains([r for r in right if not r.variant.is_vendor], policy)
    candidates = sum(not variant.is_vendor for variant in latest)
    if not paired:
        times = [r.measurement for r in right if r.variant.is_vendor and r.measurement is not None]
        if not times:
            return None
        best_vendor = min(times, key=lambda m: m.latency_us)
        return Winner(problem, None, 0.0, best_vendor.latency_us, best_vendor.noise, candidates)

    eligible = [
        (gain, r)
        for gain, r in paired
        if gain > policy.margin(r)
        and record_noise(r) <= policy.max_noise
        and r.binary is not None
        and r.binary.format != "shared_object"
    ]
    winner = None
    if eligible:
        top, best = max(eligible, key=lambda pair: pair[0])
        window = min(policy.tie, record_noise(best))
        tied = [r for gain, r in eligible if gain >= top * (1.0 - window)]
        winner = min(tied, key=lambda r: (smem_bytes(r), str(r.variant)))
    shown = winner if winner is not None else max(paired, key=lambda pair: pair[0])[1]
    assert shown.measurement is not None  # what `paired` means
    assert shown.baseline is not None
    return Winner(
        problem=problem,
        record=winner,
        latency_us=shown.measurement.latency_us,
        vendor_us=shown.baseline.latency_us,
        noise=record_noise(shown),
        candidates=candidates,
    )


def _gains(records: Sequence[Record], policy: Policy) -> list[tuple[float, Record]]:
    """Pair each record that has a baseline with its gain over it, held to the policy's drift."""
    baselines = sorted(r.baseline.latency_us for r in records if r.baseline is not None)
    if not baselines:
        return []
    usual_us = baselines[len(baselines) // 4]  # the lower quartile: stalls only add
    gains = []
    for record in records:
        speedup = record.speedup
        if speedup is not None and record.measurement is not None:
            usual = usual_us / record.measurement.latency_us
            held = min(max(speedup, usual / (1.0 + policy.drift)), usual * (1.0 + policy.drift))
            gains.append((held, record))
    return gains


def registry_facts(variant: Variant, binary: Binary) -> tuple[KernelFacts, LaunchParameters]:
    """Ask the variant's family, as the registry knows it, for what a launch needs."""
    from ktlib_generator.families.registry import family

    owner = family(variant.family)
    return owner.kernel_facts(variant, binary), owner.launch_parameters(variant)


def _entry_row(winner: Winner, kernel: int, launch: LaunchParameters) -> NDArray[Any]:
    problem, row = winner.problem, np.zeros((), ENTRY)
    for name in ("m", "n", "k", "batch", "align"):
        row[name] = getattr(problem, name)
    row["layout"], row["dtype"] = LAYOUTS.index(problem.layout), DTYPES.index(problem.dtype)
    row["accumulate"] = ACCUMULATES.index(problem.accumulate)
    row["epilogue"] = EPILOGUES.index(problem.epilogue)
    row["tier"] = TIERS.index("vendor" if winner.record is None else "exact")
    row["kernel"], row["group_m"], row["split_k"] = kernel, launch.group_m, launch.split_k
    row["candidates"] = winner.candidates
    row["latency_us"], row["vendor_us"], row["noise"] = winner.latency_us, winner.vendor_us, winner.noise
    return row


def write_pack(
    path: str | os.PathLike[str],
    records: Sequence[Record],
    binaries: Mapping[str, bytes],
    device: Device,
    policy: Policy | None = None,
    *,
    facts: FactsOf = registry_facts,
    meta: Mapping[str, Any] | None = None,
) -> PackSummary:
    """Write the winners of `records` as a pack for `device`, whole or not at all.

    `binaries` maps sha256 to images (a binary's own data is used where it is absent). Only kernels that
    win at least one problem are packed. Equal input gives equal bytes. Until the new file is complete
    and on disk, an existing one stays as it is.

    Raises:
        ValueError: a record is of another device, a problem is empty, or a winner's image is missing.
        OSError: the file could not be written; naming it, the reason and that nothing was changed.
    """
    policy = Policy() if policy is None else policy
    by_problem: dict[Problem, list[Record]] = {}
    for record in records:
        if record.environment.profile != device.profile:
            raise ValueError(
                f"pack: a record of {record.problem} was measured on {record.environment.profile}, this pack "
                f"is for {device.profile}; pack each device's records on their own"
            )
        if not (record.problem.m and record.problem.n and record.problem.k and record.problem.batch):
            raise ValueError(f"pack: {record.problem} is an empty product, which no kernel is tuned for")
        by_problem.setdefault(record.problem, []).append(record)

    def facts_of(record: Record) -> tuple[KernelFacts, LaunchParameters]:
        assert record.binary is not None  # pick_winner only asks about records that have one
        return facts(record.variant, record.binary)

    kernels, rows, unmeasured, wins = KernelTable(device, binaries), [], [], 0
    for problem in sorted(by_problem, key=_problem_order):
        winner = pick_winner(by_problem[problem], policy, lambda r: facts_of(r)[0].smem_bytes)
        if winner is None:
            unmeasured.append(problem)
        elif winner.record is None or winner.record.binary is None:
            rows.append(_entry_row(winner, VENDOR_KERNEL, LaunchParameters()))
        else:
            kernel_facts, launch = facts_of(winner.record)
            _refuse_mismatch(kernel_facts, problem)
            rows.append(_entry_row(winner, kernels.add(kernel_facts, winner.record.binary), launch))
            wins += 1
    about = {**(meta or {}), "policy": asdict(policy), "records": len(records)}
    data = file_bytes(device, about, kernels, rows)
    write_whole(Path(path), data)
    return PackSummary(Path(path), len(rows), wins, len(kernels.rows), len(data), tuple(unmeasured))


def _refuse_mismatch(facts: KernelFacts, problem: Problem) -> None:
    """Raise ValueError when a family's facts contradict the problem that its kernel won."""
    served = facts.layout in ("any", problem.layout) and problem.k % facts.k_multiple == 0
    names = ("dtype", "accumulate", "epilogue")
    same = all(getattr(facts, name) == getattr(problem, name) for name in names)
    if not (served and same):
        raise ValueError(
            f"pack: {facts.name} won {problem}, but its facts say {facts.layout} {facts.dtype} accumulate "
            f"{facts.accumulate} epilogue {facts.epilogue}, k a multiple of {facts.k_multiple}; fix "
            f"kernel_facts of family {facts.family}"
        )


def _problem_order(problem: Problem) -> tuple[Any, ...]:
    return (problem.dtype, problem.layout, problem.m, problem.n, problem.k, str(problem))
