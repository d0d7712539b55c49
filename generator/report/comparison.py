"""Compares two result files problem by problem and says what became slower beyond the noise.

Must not read files or print; `compare` is pure, and `Comparison` says all that the command shows.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ktlib.problem import Problem
from ktlib_generator.report.rows import CONTROL, OURS, ResultFile, Row
from ktlib_generator.report.speedups import ALL, CLASSES, class_of, percentile, us
from ktlib_generator.values import Status

# A change smaller than this is not worth a word, however quiet the machine.
TOLERANCE = 0.01
# A class's mean has to move by this many standard errors; with a dozen means tested, two would cry wolf.
SIGMAS = 3.0
# One problem has to move by this much of its own noise, and by PROBLEM_FLOOR at least. Single stalls happen
# (about one problem in 200 on the H200), so slow problems decide only when there are several of them.
PROBLEM_SIGMAS = 4.0
PROBLEM_FLOOR = 0.05
PROBLEM_SHARE = 0.02
PROBLEM_COUNT = 3
# A quartile distance (halved) times this is a standard deviation, for bell-shaped samples.
QUARTILE_TO_SIGMA = 1.4826
# Control over baseline is two times; B's ratio over A's is four, and 1.96 sigmas are 95%.
CONTROL_TO_SIGMA = 1.96 / math.sqrt(2)
# The same card at the same settings repeats its clocks to within this.
CLOCK_TOLERANCE = 0.03
INFORMATION = ("device", "driver", "driver_cuda", "cublas", "cuda_runtime", "torch", "numpy", "python")

Key = tuple[str, Problem, str]


@dataclass(frozen=True)
class Change:
    """How one method's times of one class moved from A to B: `ratio` is B over A, above 1 is slower.

    `relative` is the same after the other baselines' movement on the same problems is taken out. `noise`
    is what the judged ratio may move by chance. `verdict` is `slower`, `faster` or `same`.
    """

    suite: str
    protocol: str
    method: str
    flop_class: str
    problems: int
    ratio: float
    relative: float
    noise: float
    verdict: str


@dataclass(frozen=True)
class Slowed:
    """One problem that became slower than its own noise explains."""

    suite: str
    protocol: str
    method: str
    problem: str
    a_us: float
    b_us: float
    relative: float
    noise: float


@dataclass(frozen=True)
class Comparison:
    """What changed. `regressions` says in words what makes B worse; empty when nothing does."""

    a: str
    b: str
    pairs: int
    changes: tuple[Change, ...]
    slowed: tuple[Slowed, ...]
    failed: tuple[str, ...]
    only_a: int
    only_b: int
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    regressions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything by name, as `--json` prints it."""
        return asdict(self)


@dataclass(frozen=True)
class _Paired:
    """One method's times of one problem in both files, as logarithms of ratios."""

    problem: Problem
    a: Row
    b: Row
    log_ratio: float
    log_relative: float
    sigma: float

    def judged(self, absolute: bool) -> float:
        return self.log_ratio if absolute else self.log_relative


def compare(
    a: ResultFile, b: ResultFile, *, tolerance: float = TOLERANCE, absolute: bool = False
) -> Comparison:
    """Compare B with A, method by method and class by class.

    Unless `absolute`, a method is judged relative to the other baselines on the same problems, which takes
    out what the whole machine did (clocks, temperature); `warnings` says so when it did much.

    Raises:
        ValueError: the files have no problem, method and protocol in common.
    """
    rows_a, rows_b = _by_key(a), _by_key(b)
    common = [key for key in rows_a if key in rows_b]
    if not common:
        raise ValueError(
            f"{a.path} and {b.path} share no problem, method and protocol; compare files of one suite"
        )
    failed = tuple(
        f"{key[1]} by {key[2]}: {rows_b[key].status.value} in B"
        for key in common
        if rows_a[key].status is Status.OK and rows_b[key].status is not Status.OK
    )
    groups: dict[tuple[str, str, str], list[Key]] = {}
    for key in common:
        if rows_a[key].latency_us is not None and rows_b[key].latency_us is not None:
            row = rows_b[key]
            groups.setdefault((row.suite, row.protocol, row.method), []).append(key)
    controlled = b.environment.get("control", "torch")
    moves = _moves(groups, rows_a, rows_b)
    changes: list[Change] = []
    slowed: list[Slowed] = []
    crowds: list[str] = []
    scatters: dict[tuple[str, str], float] = {}
    for (suite, protocol, method), keys in groups.items():
        if (suite, protocol) not in scatters:
            scatters[suite, protocol] = _control_scatter(a, b, suite, protocol, controlled)
        scatter = scatters[suite, protocol]
        others = _others(method, moves[suite, protocol], controlled)
        paired = [_pair(key, rows_a, rows_b, others) for key in keys]
        changes += _changes(suite, protocol, method, paired, scatter, tolerance, absolute)
        found = _slowed(suite, protocol, method, paired, scatter, tolerance, absolute)
        slowed += found
        if method != CONTROL and len(found) >= max(PROBLEM_COUNT, PROBLEM_SHARE * len(paired)):
            crowds.append(f"{method} ({suite}, {protocol}): {len(found)} of {len(paired)} problems slower")
    regressions = [
        f"{c.method} ({c.suite}, {c.protocol}), class {c.flop_class}: "
        f"{(c.ratio if absolute else c.relative) - 1:+.1%} over {c.problems} problems, noise {c.noise:.1%}"
        for c in changes
        if c.verdict == "slower" and c.method != CONTROL
    ]
    regressions += crowds
    regressions += [f"failed: {text}" for text in failed]
    return Comparison(
        a=str(a.path),
        b=str(b.path),
        pairs=sum(len(keys) for keys in groups.values()),
        changes=tuple(changes),
        slowed=tuple(sorted(slowed, key=lambda found: -found.relative)),
        failed=failed,
        only_a=sum(key not in rows_b for key in rows_a),
        only_b=sum(key not in rows_a for key in rows_b),
        warnings=(*_clock_warnings(a.environment, b.environment), *_drift_warnings(moves)),
        notes=_notes(a.environment, b.environment),
        regressions=tuple(regressions),
    )


def _by_key(file: ResultFile) -> dict[Key, Row]:
    return {(f"{row.suite}|{row.protocol}", row.problem, row.method): row for row in file.rows}


def _moves(
    groups: Mapping[tuple[str, str, str], Sequence[Key]], rows_a: Mapping[Key, Row], rows_b: Mapping[Key, Row]
) -> dict[tuple[str, str], dict[str, float]]:
    """How far each method of others moved as a whole: suite and protocol -> method -> mean of logarithms."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for (suite, protocol, method), keys in groups.items():
        place = found.setdefault((suite, protocol), {})
        if method not in OURS:
            place[method] = statistics.fmean(math.log(us(rows_b[key]) / us(rows_a[key])) for key in keys)
    return found


def _others(method: str, moves: Mapping[str, float], controlled: str) -> list[str]:
    """Baselines whose movement says what the machine did: not ours, not the judged one nor its repeat.

    Where they moved apart, some of them changed themselves (a new library); those that moved least stand
    for the machine, so that the others neither hide what we did nor make us guilty.
    """
    same = {method, CONTROL} | ({controlled} if method == CONTROL else set())
    free = {name: moved for name, moved in moves.items() if name not in same}
    least = min(free.values(), key=abs, default=0.0)
    return [name for name, moved in free.items() if abs(moved - least) <= TOLERANCE]


def _pair(key: Key, rows_a: Mapping[Key, Row], rows_b: Mapping[Key, Row], others: Sequence[str]) -> _Paired:
    place, problem, _ = key
    a, b = rows_a[key], rows_b[key]
    moved, sigmas = [], []
    for other in others:
        first, second = rows_a.get((place, problem, other)), rows_b.get((place, problem, other))
        if first and second and first.latency_us and second.latency_us:
            moved.append(math.log(second.latency_us / first.latency_us))
            sigmas.append(_sigma(first, second))
    ratio = math.log(us(b) / us(a))
    # The median: one of several may have stalled on this problem.
    drift, drift_sigma = (statistics.median(moved), statistics.median(sigmas)) if moved else (0.0, 0.0)
    return _Paired(problem, a, b, ratio, ratio - drift, math.hypot(_sigma(a, b), drift_sigma))


def _sigma(a: Row, b: Row) -> float:
    """Standard error of the logarithm of a ratio of two medians."""
    errors = (QUARTILE_TO_SIGMA * row.spread * math.sqrt(math.pi / 2 / max(1, row.samples)) for row in (a, b))
    return math.hypot(*errors)


def _control_scatter(a: ResultFile, b: ResultFile, suite: str, protocol: str, controlled: str) -> float:
    """95th percentile of how far control strays from the baseline it repeats, in the worse of both files."""
    worst = 0.0
    for file in (a, b):
        times: dict[Problem, dict[str, float]] = {}
        for row in file.rows:
            if (row.suite, row.protocol) == (suite, protocol) and row.latency_us is not None:
                times.setdefault(row.problem, {})[row.method] = row.latency_us
        found = sorted(
            abs(math.log(t[CONTROL] / t[controlled]))
            for t in times.values()
            if CONTROL in t and controlled in t
        )
        worst = max(worst, percentile(found, 0.95) if found else 0.0)
    return worst


def _changes(
    suite: str,
    protocol: str,
    method: str,
    paired: Sequence[_Paired],
    scatter: float,
    tolerance: float,
    absolute: bool,
) -> list[Change]:
    made = []
    groups = [(label, [p for p in paired if class_of(p.problem) == label]) for _, label in CLASSES]
    for label, group in [*groups, (ALL, list(paired))]:
        if not group:
            continue
        logs = [p.judged(absolute) for p in group]
        mean = statistics.fmean(logs)
        # By what was seen between the problems, and by what spread and control lead one to expect.
        seen = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 2 else 0.0
        expected = math.sqrt(sum(max(p.sigma, scatter / CONTROL_TO_SIGMA) ** 2 for p in group)) / len(group)
        noise = max(SIGMAS * max(seen, expected), tolerance)
        verdict = "slower" if mean > math.log1p(noise) else "faster" if mean < -math.log1p(noise) else "same"
        made.append(
            Change(
                suite=suite,
                protocol=protocol,
                method=method,
                flop_class=label,
                problems=len(group),
                ratio=math.exp(statistics.fmean(p.log_ratio for p in group)),
                relative=math.exp(statistics.fmean(p.log_relative for p in group)),
                noise=noise,
                verdict=verdict,
            )
        )
    return made


def _slowed(
    suite: str,
    protocol: str,
    method: str,
    paired: Sequence[_Paired],
    scatter: float,
    tolerance: float,
    absolute: bool,
) -> list[Slowed]:
    found = []
    for p in paired:
        noise = max(PROBLEM_SIGMAS * max(p.sigma, scatter / CONTROL_TO_SIGMA), PROBLEM_FLOOR, tolerance)
        moved = p.judged(absolute)
        if moved > math.log1p(noise):
            found.append(
                Slowed(suite, protocol, method, str(p.problem), us(p.a), us(p.b), math.exp(moved), noise)
            )
    return found


def _clock_warnings(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    found = []
    for name in sorted({*a, *b}):
        first, second = _number(a.get(name)), _number(b.get(name))
        if name.startswith("clock_") and first and second and abs(second / first - 1) > CLOCK_TOLERANCE:
            word = "dropped" if second < first else "rose"
            found.append(
                f"{name} {word} by {abs(second / first - 1):.1%}: {a[name]} in A, {b[name]} in B; times of "
                "the two runs are not at the same clock"
            )
        if name == "power_limit_w" and first != second:
            found.append(f"power_limit_w differs: {a.get(name, 'none')} in A, {b.get(name, 'none')} in B")
        for label, about in (("A", a), ("B", b)):
            if "throttl" in name and about.get(name, "").lower() not in ("", "0", "no", "none", "false"):
                found.append(f"{label} was measured under throttling ({name}: {about[name]})")
    for key in ("device", "sm_count"):
        if a.get(key) != b.get(key):
            found.append(f"{key} differs: {a.get(key, 'unknown')} in A, {b.get(key, 'unknown')} in B")
    return found


def _drift_warnings(moves: Mapping[tuple[str, str], Mapping[str, float]]) -> list[str]:
    found = []
    for (suite, protocol), every in moves.items():
        moved = {name: by for name, by in every.items() if name != CONTROL}
        if not moved:
            continue
        least = min(moved.values(), key=abs)
        if abs(least) > TOLERANCE:
            word = "slower" if least > 0 else "faster"
            found.append(
                f"{suite}, {protocol}: every baseline is {word} in B, by {abs(math.expm1(least)):.1%} at "
                "least; the whole machine changed, so read the relative column"
            )
        if max(moved.values()) - min(moved.values()) > TOLERANCE:
            each = ", ".join(f"{name} {math.expm1(by):+.1%}" for name, by in moved.items())
            found.append(
                f"{suite}, {protocol}: the baselines moved apart ({each}); those that moved least are taken "
                "for what the machine did"
            )
    return found


def _notes(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(
        f"{name}: {a.get(name, 'unknown')} in A, {b.get(name, 'unknown')} in B"
        for name in (*INFORMATION, "commit")
        if a.get(name) != b.get(name) and name != "device"
    )


def _number(text: str | None) -> float | None:
    match = re.match(r"^\s*(\d+(?:\.\d+)?)", text or "")
    return float(match.group(1)) if match else None
