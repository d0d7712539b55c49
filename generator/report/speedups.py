"""Sets our times against the baselines' of the same run: pairs, means by FLOP class, losses, noise.

Must not read files or draw. A call of ours that the vendor served counts as the vendor's, never as a win.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ktlib.problem import Problem
from ktlib_generator.report.rows import CONTROL, Row, Section

# Upper bounds in GFLOP. Everything is reported by these classes: what limits a product changes with its size.
CLASSES = ((0.5, "< 0.5"), (8.0, "0.5 to 8"), (140.0, "8 to 140"), (math.inf, "> 140"))
ALL = "all"
# Below this a problem counts as lost; nearer to 1 is within what dispatch may cost.
LOSS = 0.98
# Shorter kernels are timed near the clock's grain, so noise is stated for the longer ones.
NOISE_FROM_US = 5.0


@dataclass(frozen=True)
class Pair:
    """One problem by one method of ours and one baseline, from the same run."""

    problem: Problem
    ours: Row
    baseline: Row

    @property
    def speedup(self) -> float:
        """Baseline's time over ours."""
        return us(self.baseline) / us(self.ours)

    @property
    def is_win(self) -> bool:
        """Whether a kernel of ours ran and was faster."""
        return self.ours.is_ours and self.speedup > 1.0

    @property
    def is_loss(self) -> bool:
        """Whether a user loses by it, whoever served the call."""
        return self.speedup < LOSS


@dataclass(frozen=True)
class ClassSummary:
    """Speed-ups of one class of problems over one baseline.

    `geomean` and `mean` are over every problem as it was served; `geomean_own` over those that our kernels
    served (None when the vendor served all). `wins` are of our kernels alone.
    """

    label: str
    problems: int
    geomean: float
    mean: float
    own: int
    geomean_own: float | None
    wins: int
    losses: int
    worst: Pair

    @property
    def win_rate(self) -> float:
        """Share of all problems that our kernels win."""
        return self.wins / self.problems


@dataclass(frozen=True)
class Floor:
    """How much a repeated baseline differs from itself: absolute relative differences."""

    problems: int
    median: float
    p95: float


def us(row: Row) -> float:
    """Return the row's time; only rows with status ok have one."""
    assert row.latency_us is not None
    return row.latency_us


def class_of(problem: Problem) -> str:
    """Name the FLOP class that a problem belongs to."""
    return next(label for high, label in CLASSES if problem.flops / 1e9 < high)


def geomean(values: Iterable[float]) -> float:
    """Return the geometric mean.

    Raises:
        ValueError: there are no values.
    """
    logs = [math.log(value) for value in values]
    if not logs:
        raise ValueError("geomean of nothing")
    return math.exp(statistics.fmean(logs))


def pairs(section: Section, subject: str, baseline: str) -> list[Pair]:
    """Pair two methods wherever both have a time, smallest problem first."""
    found = [
        Pair(problem, times[subject], times[baseline])
        for problem, times in section.by_problem.items()
        if subject in times and baseline in times
    ]
    return sorted(found, key=lambda pair: (pair.problem.flops, str(pair.problem)))


def summarise(found: Sequence[Pair]) -> list[ClassSummary]:
    """Summarise by FLOP class, classes without problems left out, and all together last."""
    groups = [(label, [pair for pair in found if class_of(pair.problem) == label]) for _, label in CLASSES]
    return [_summary(label, group) for label, group in [*groups, (ALL, list(found))] if group]


def _summary(label: str, group: Sequence[Pair]) -> ClassSummary:
    own = [pair.speedup for pair in group if pair.ours.is_ours]
    return ClassSummary(
        label=label,
        problems=len(group),
        geomean=geomean(pair.speedup for pair in group),
        mean=statistics.fmean(pair.speedup for pair in group),
        own=len(own),
        geomean_own=geomean(own) if own else None,
        wins=sum(pair.is_win for pair in group),
        losses=sum(pair.is_loss for pair in group),
        worst=min(group, key=lambda pair: pair.speedup),
    )


def losses(found: Sequence[Pair]) -> list[Pair]:
    """Return the lost problems, worst first."""
    return sorted((pair for pair in found if pair.is_loss), key=lambda pair: pair.speedup)


def noise_floor(section: Section, above_us: float = 0.0) -> Floor | None:
    """Say how far the control strays from the baseline it repeats, on problems longer than `above_us`.

    None where the run had no control, or no such problem.
    """
    if section.controlled is None:
        return None
    found = sorted(
        abs(us(times[CONTROL]) / us(times[section.controlled]) - 1.0)
        for times in section.by_problem.values()
        if CONTROL in times and section.controlled in times and us(times[section.controlled]) > above_us
    )
    if not found:
        return None
    return Floor(len(found), statistics.median(found), percentile(found, 0.95))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the sorted values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
