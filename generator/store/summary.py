"""What a database holds, in a few lines: counts, environments, and the fastest record of each problem.

For the eye only: the fastest here is no decision; the policy in `ktlib_generator.pack` picks winners.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ktlib.problem import Problem
from ktlib_generator.store.files import shown
from ktlib_generator.store.hdf5_read import read_database
from ktlib_generator.values import Record, Status


@dataclass(frozen=True)
class Fastest:
    """The record with the smallest median for a problem, and its interleaved baseline where it has one."""

    problem: str
    variant: str
    latency_us: float
    noise: float
    baseline: str
    baseline_us: float | None
    speedup: float | None


@dataclass(frozen=True)
class Summary:
    """What `inspect` found; `str` gives it as text."""

    path: str
    profile: str
    content_sha256: str
    meta: dict[str, str]
    records: int
    by_status: dict[str, int]
    problems: int
    variants_by_family: dict[str, int]
    binaries: int
    binary_bytes: int
    environments: tuple[str, ...]
    fastest: tuple[Fastest, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, in plain JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.path}: profile {self.profile}, content {self.content_sha256[:16]}",
            f"records      {self.records} ({_counts(self.by_status)})",
            f"problems     {self.problems}",
            f"variants     {_counts(self.variants_by_family)}",
            f"binaries     {self.binaries} ({self.binary_bytes} bytes)",
        ]
        lines += [f"meta         {name}: {value}" for name, value in sorted(self.meta.items())]
        lines += [f"environment  {text}" for text in self.environments]
        lines += [_line(entry) for entry in self.fastest]
        return "\n".join(lines)


def inspect(path: str | os.PathLike[str]) -> Summary:
    """Summarise the database at `path`.

    Raises:
        DatabaseError: it cannot be read.
    """
    database = read_database(path)
    records = database.records
    variants = {record.variant for record in records}
    return Summary(
        path=shown(path),
        profile=database.profile,
        content_sha256=database.content_sha256,
        meta=database.meta,
        records=len(records),
        by_status=dict(Counter(record.status.value for record in records)),
        problems=len({record.problem for record in records}),
        variants_by_family=dict(sorted(Counter(variant.family for variant in variants).items())),
        binaries=len(database.binaries),
        binary_bytes=sum(len(data) for data in database.binaries.values()),
        environments=tuple(sorted({str(record.environment) for record in records})),
        fastest=tuple(fastest_by_problem(records)),
    )


def fastest_by_problem(records: Iterable[Record]) -> list[Fastest]:
    """Return the fastest ok record of each problem, in the order the problems come."""
    best: dict[Problem, tuple[float, Record]] = {}
    for record in records:
        if record.status is not Status.OK or record.measurement is None:
            continue
        latency_us = record.measurement.latency_us
        if record.problem not in best or latency_us < best[record.problem][0]:
            best[record.problem] = (latency_us, record)
    return [_fastest(record) for _, record in best.values()]


def _fastest(record: Record) -> Fastest:
    assert record.measurement is not None
    return Fastest(
        problem=str(record.problem),
        variant=str(record.variant),
        latency_us=record.measurement.latency_us,
        noise=record.measurement.noise,
        baseline=record.baseline.method if record.baseline else "",
        baseline_us=record.baseline.latency_us if record.baseline else None,
        speedup=record.speedup,
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _line(entry: Fastest) -> str:
    latency = f"{entry.latency_us:.3f} us, noise {entry.noise:.1%}"
    text = f"fastest      {entry.problem}: {latency}, {entry.variant}"
    return text if entry.speedup is None else f"{text}, {entry.speedup:.3f}x {entry.baseline}"
