"""Reads result files: `# key: value` lines, a header, one row for each problem, method and protocol.

Must not judge speed; it refuses what is malformed, with the file and line.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ktlib.problem import TIERS, Problem
from ktlib_generator.values import Status

PROBLEM_COLUMNS = ("suite", "batch", "m", "n", "k", "layout", "dtype", "accumulate")
COLUMNS = (
    *PROBLEM_COLUMNS,
    "method",
    "protocol",
    "median_us",
    "spread",
    "samples",
    "kernel",
    "tier",
    "status",
)
# 99th percentile of the samples; `server` files have it where the tail matters.
OPTIONAL_COLUMNS = ("p99_us",)

OURS = ("ktlib", "ktlib_own")
CONTROL = "control"
# Marks a method that nobody timed: the faster of two layouts, see `best_of_layouts`.
BEST_SUFFIX = "_best"
# The best own kernel, dispatched or not, has a tier of its own in result files.
ROW_TIERS = (*TIERS, "own", "")
VENDOR_TIERS = ("vendor", "vendor_algorithm", "")


class ResultError(ValueError):
    """A result file says something that makes no sense; the message begins with file:line."""


@dataclass(frozen=True)
class Row:
    """One line of a result file. `latency_us` is None exactly where `status` is not ok.

    `spread` is half the distance between the samples' quartiles over their median.
    """

    suite: str
    problem: Problem
    method: str
    protocol: str
    latency_us: float | None
    spread: float
    samples: int
    kernel: str
    tier: str
    status: Status
    line: int = 0
    p99_us: float | None = None

    @property
    def is_ours(self) -> bool:
        """Whether a kernel of ours ran; a call of ours that the vendor served is not ours."""
        return self.method in OURS and self.tier not in VENDOR_TIERS


@dataclass(frozen=True)
class ResultFile:
    """A file's environment by name, and its rows in order; no two rows share problem, method and protocol."""

    path: Path
    environment: dict[str, str]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Section:
    """The rows of one file that may be set against each other: one suite, protocol and accumulation."""

    file: ResultFile
    suite: str
    protocol: str
    accumulate: str
    rows: tuple[Row, ...]
    by_problem: dict[Problem, dict[str, Row]] = field(compare=False)

    @property
    def title(self) -> str:
        """Name for people."""
        extra = "" if self.accumulate == "fp32" else f", accumulate {self.accumulate}"
        return f"{self.suite}, {self.protocol}{extra}"

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """Methods with at least one time, in the file's order."""
        return tuple(dict.fromkeys(row.method for row in self.rows if row.latency_us is not None))

    @property
    def subjects(self) -> tuple[str, ...]:
        """Our methods that were timed: as dispatched first."""
        return tuple(method for method in OURS if method in self.methods)

    @cached_property
    def baselines(self) -> tuple[str, ...]:
        """Timed methods of others; the control is none, it repeats one of them."""
        return tuple(method for method in self.methods if method not in (*OURS, CONTROL))

    @cached_property
    def controlled(self) -> str | None:
        """The baseline that `control` repeats; None without both."""
        named = self.file.environment.get("control", "torch")
        return named if CONTROL in self.methods and named in self.baselines else None


def read_result(path: Path) -> ResultFile:
    """Read one result file.

    Raises:
        ResultError: `path:line` and what is wrong there.
        OSError: the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ResultError(f"{path}:1: not a text file in UTF-8 ({error.reason})") from None
    environment: dict[str, str] = {}
    start = 0
    while start < len(lines) and (lines[start].startswith("#") or not lines[start].strip()):
        key, colon, value = lines[start].lstrip("#").partition(":")
        if lines[start].strip() and not colon:
            raise ResultError(f"{path}:{start + 1}: expected '# key: value', got {lines[start]!r}")
        if colon:
            environment[key.strip()] = value.strip()
        start += 1
    if start == len(lines):
        raise ResultError(f"{path}:{max(start, 1)}: no column names and no rows (the file is empty)")
    reader = csv.reader(lines[start:])
    columns = [name.strip() for name in next(reader)]
    _check_columns(path, start + 1, columns)
    rows: list[Row] = []
    seen: dict[tuple[str, Problem, str, str], int] = {}
    for cells in reader:
        line = start + reader.line_num
        if not cells:
            continue
        if len(cells) != len(columns):
            raise ResultError(f"{path}:{line}: {len(cells)} cells under {len(columns)} columns")
        row = _parse(f"{path}:{line}", dict(zip(columns, cells, strict=True)), line)
        key_ = (row.suite, row.problem, row.method, row.protocol)
        if key_ in seen:
            raise ResultError(
                f"{path}:{line}: {row.problem} by {row.method} under {row.protocol} is already on line "
                f"{seen[key_]}; a problem, method and protocol have one row"
            )
        seen[key_] = line
        rows.append(row)
    if not rows:
        raise ResultError(f"{path}:{start + 1}: column names but no rows")
    return ResultFile(path, environment, tuple(rows))


def sections(file: ResultFile) -> tuple[Section, ...]:
    """Split a file by suite, protocol and accumulation, in the file's order."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in file.rows:
        groups.setdefault((row.suite, row.protocol, row.problem.accumulate), []).append(row)
    return tuple(
        Section(file, suite, protocol, accumulate, tuple(rows), by_problem(rows))
        for (suite, protocol, accumulate), rows in groups.items()
    )


def by_problem(rows: Iterable[Row]) -> dict[Problem, dict[str, Row]]:
    """Return problem -> method -> row, for rows that have a time."""
    found: dict[Problem, dict[str, Row]] = {}
    for row in rows:
        if row.latency_us is not None:
            found.setdefault(row.problem, {})[row.method] = row
    return found


def best_of_layouts(section: Section, methods: Sequence[str]) -> Section:
    """Add `<method>_best`: for each problem the faster of its `nn` and `nt` times by that method.

    This is how published numbers treat cuBLAS, which may be handed either storage of B. A method without
    a problem timed in both layouts adds nothing.
    """
    added: list[Row] = []
    for problem, times in section.by_problem.items():
        if problem.layout not in ("nn", "nt"):
            continue
        twin = replace(problem, layout="nt" if problem.layout == "nn" else "nn", align=0)
        for method in methods:
            pair = [found[method] for found in (times, section.by_problem.get(twin, {})) if method in found]
            if len(pair) == 2:
                best = min(pair, key=lambda row: row.latency_us or math.inf)
                added.append(replace(best, problem=problem, method=method + BEST_SUFFIX))
    if not added:
        return section
    rows = (*section.rows, *added)
    return replace(section, rows=rows, by_problem=by_problem(rows))


def _check_columns(path: Path, line: int, columns: Sequence[str]) -> None:
    missing = [name for name in COLUMNS if name not in columns]
    unknown = [name for name in columns if name not in (*COLUMNS, *OPTIONAL_COLUMNS)]
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if missing or unknown or twice:
        faults = [
            f"{what} {', '.join(map(repr, names))}"
            for what, names in (("missing", missing), ("unknown", unknown), ("repeated", twice))
            if names
        ]
        raise ResultError(f"{path}:{line}: columns {'; '.join(faults)} (expected {','.join(COLUMNS)})")


def _parse(where: str, cells: dict[str, str], line: int) -> Row:
    try:
        m, n, k, batch = (_whole(cells, name) for name in ("m", "n", "k", "batch"))
        problem = Problem(m, n, k, cells["layout"], cells["dtype"], cells["accumulate"], batch)
        if 0 in (m, n, k, batch):
            raise ValueError(f"problem {problem} is empty: there is nothing to time")
        for name in ("suite", "method", "protocol"):
            if not cells[name]:
                raise ValueError(f"{name} is empty")
        if cells["tier"] not in ROW_TIERS:
            raise ValueError(
                f"tier {cells['tier']!r} is unknown (have: {', '.join(filter(None, ROW_TIERS))})"
            )
        known = [status.value for status in Status]
        if cells["status"] not in known:
            raise ValueError(f"status {cells['status']!r} is unknown (have: {', '.join(known)})")
        status = Status(cells["status"])
        ok = status is Status.OK
        if not ok and cells["median_us"]:
            raise ValueError(
                f"status {status.value} with a time ({cells['median_us']}); leave median_us empty"
            )
        latency_us = _positive(cells, "median_us") if ok else None
        spread = _positive(cells, "spread", zero=True) if ok else 0.0
        tail = _positive(cells, "p99_us") if ok and cells.get("p99_us") else None
        samples = _whole(cells, "samples") if ok or cells["samples"] else 0
        if ok and samples < 1:
            raise ValueError("samples must be at least 1 where status is ok")
    except ValueError as error:
        raise ResultError(f"{where}: {error}") from None
    return Row(
        cells["suite"], problem, cells["method"], cells["protocol"], latency_us, spread, samples,
        cells["kernel"], cells["tier"], status, line, tail,
    )  # fmt: skip


def _whole(cells: dict[str, str], name: str) -> int:
    if not cells[name].isdecimal():
        raise ValueError(f"{name} must be a whole number, got {cells[name]!r}")
    return int(cells[name])


def _positive(cells: dict[str, str], name: str, zero: bool = False) -> float:
    try:
        value = float(cells[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        least = "a number from 0" if zero else "a number above 0"
        raise ValueError(f"{name} must be {least}, got {cells[name]!r}")
    return value
