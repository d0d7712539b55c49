"""What a user sees while a run goes on: a bar on a terminal, a line for each problem elsewhere.

Must not decide anything; it is told what happened.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TextIO

from ktlib.problem import Problem
from ktlib_generator.values import Record, Status

if TYPE_CHECKING:
    from rich.progress import Progress as RichBar
    from rich.progress import TaskID

_SHOWN_PROBLEMS = 8


@dataclass
class Tally:
    """Counts of a run, kept by whoever shows them."""

    ok: int = 0
    failed: int = 0
    best: dict[Problem, float] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Record]) -> Tally:
        """Count several records."""
        made = cls()
        for record in records:
            made.add(record)
        return made

    def add(self, record: Record) -> None:
        """Count one record."""
        if record.status is Status.OK:
            self.ok += 1
        else:
            self.failed += 1
        speedup = record.speedup
        if speedup is not None:
            self.best[record.problem] = max(speedup, self.best.get(record.problem, 0.0))

    @property
    def counts(self) -> str:
        """The counts that are not zero: `14 ok, 2 failed`."""
        parts = [f"{self.ok} ok"] * bool(self.ok) + [f"{self.failed} failed"] * bool(self.failed)
        return ", ".join(parts)

    @property
    def geomean(self) -> float | None:
        """Geometric mean over problems of the best speed-up so far; None before the first."""
        if not self.best:
            return None
        return math.exp(sum(math.log(value) for value in self.best.values()) / len(self.best))


class Progress(Protocol):
    """Told by the loop what happens, in this order for each problem: problem, trial..., problem_done."""

    def begin(self, *, problems: int, trials: int, wall_s: float | None) -> None:
        """The run starts; `trials` is an upper bound of those it will make."""
        ...

    def problem(self, problem: Problem, *, trials: int, before: Sequence[Record]) -> None:
        """A problem starts: `trials` to come at most, `before` were made in earlier runs."""
        ...

    def trial(self, record: Record) -> None:
        """One trial ended."""
        ...

    def problem_done(self, problem: Problem, *, skipped_trials: int, note: str) -> None:
        """A problem ended; `skipped_trials` of those announced are not made, `note` may say why."""
        ...

    def end(self) -> None:
        """The run ended, in whatever way; called once, also after an error."""
        ...


class Quiet:
    """Shows nothing."""

    def begin(self, *, problems: int, trials: int, wall_s: float | None) -> None:
        """Show nothing."""

    def problem(self, problem: Problem, *, trials: int, before: Sequence[Record]) -> None:
        """Show nothing."""

    def trial(self, record: Record) -> None:
        """Show nothing."""

    def problem_done(self, problem: Problem, *, skipped_trials: int, note: str) -> None:
        """Show nothing."""

    def end(self) -> None:
        """Show nothing."""


class Lines(Quiet):
    """One line for each problem, for logs and pipes."""

    def __init__(self, stream: TextIO, heading: str = "") -> None:
        self._stream = stream
        self._heading = heading
        self._problems = 0
        self._index = 0
        self._begin_s = 0.0
        self._trials = 0
        self._before = Tally()
        self._tally = Tally()

    def begin(self, *, problems: int, trials: int, wall_s: float | None) -> None:
        """Say what is coming."""
        self._problems = problems
        self._begin_s = time.monotonic()
        if self._heading:
            self._print(self._heading)
        limit = "" if wall_s is None else f", at most {duration(wall_s)}"
        self._print(f"tuning {counted(problems, 'problem')}, up to {counted(trials, 'trial')}{limit}")

    def problem(self, problem: Problem, *, trials: int, before: Sequence[Record]) -> None:
        """Start counting."""
        self._index += 1
        self._trials = trials
        self._before = Tally.of(before)
        self._tally = Tally()

    def trial(self, record: Record) -> None:
        """Count."""
        self._tally.add(record)

    def problem_done(self, problem: Problem, *, skipped_trials: int, note: str) -> None:
        """Print the problem's line: what this run did, and what was known before it."""
        speedups = [*self._before.best.values(), *self._tally.best.values()]
        best = f"best {max(speedups):.2f}x" if speedups else "no kernel"
        before = self._before.counts
        if self._trials:
            clock = duration(time.monotonic() - self._begin_s)
            text = f"{best}, {self._tally.ok} ok, {self._tally.failed} failed, {clock}"
            notes = [note, f"{before} before" if before else ""]
        else:
            text = f"done before ({before}), {best}" if before else best
            notes = [note]
        said = "; ".join(filter(None, notes))
        self._print(f"[{self._index}/{self._problems}] {problem}: {text}" + (f" ({said})" if said else ""))

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class Bar(Quiet):
    """A rich progress bar: problem, best so far, counts, elapsed, time left."""

    def __init__(self, stream: TextIO, heading: str = "") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar: RichBar = Progress(
            TextColumn("{task.fields[problem]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("best {task.fields[best]} all {task.fields[geomean]}"),
            TextColumn("[green]{task.fields[ok]} ok[/] [red]{task.fields[failed]} failed[/]"),
            TextColumn("{task.fields[clock]}"),
            console=Console(file=stream),
            refresh_per_second=4,
        )
        self._heading = heading
        self._task: TaskID | None = None
        self._tally = Tally()
        self._begin_s = 0.0
        self._wall_s: float | None = None
        self._total = 0
        self._made = 0
        self._problem: Problem | None = None

    def begin(self, *, problems: int, trials: int, wall_s: float | None) -> None:
        """Draw the bar."""
        if self._heading:
            self._bar.console.print(self._heading, markup=False, highlight=False, soft_wrap=True)
        self._begin_s = time.monotonic()
        self._wall_s = wall_s
        self._total = trials
        self._task = self._bar.add_task(
            "tune", total=trials, problem="starting", best="-", geomean="-", ok=0, failed=0, clock=""
        )
        self._bar.start()

    def problem(self, problem: Problem, *, trials: int, before: Sequence[Record]) -> None:
        """Name the problem, and count what is known of it."""
        self._problem = problem
        for record in before:
            self._tally.add(record)
        self._update()

    def trial(self, record: Record) -> None:
        """Move on by one."""
        self._tally.add(record)
        self._made += 1
        self._update()

    def problem_done(self, problem: Problem, *, skipped_trials: int, note: str) -> None:
        """Take the trials that will not be made off the total."""
        self._total -= skipped_trials
        if note:
            self._bar.console.print(f"{problem}: {note}", markup=False, highlight=False)
        self._update()

    def end(self) -> None:
        """Leave the last state on the screen."""
        if self._task is not None:
            self._update()
            self._bar.stop()

    def _update(self) -> None:
        if self._task is None:
            return
        elapsed_s = time.monotonic() - self._begin_s
        best = self._tally.best.get(self._problem) if self._problem is not None else None
        self._bar.update(
            self._task,
            completed=self._made,
            total=self._total,
            problem=str(self._problem or ""),
            best=_times(best),
            geomean=_times(self._tally.geomean),
            ok=self._tally.ok,
            failed=self._tally.failed,
            clock=f"{duration(elapsed_s)}, {_left(elapsed_s, self._made, self._total, self._wall_s)}",
        )


def make_progress(*, quiet: bool, stream: TextIO | None = None, heading: str = "") -> Progress:
    """Return what fits: nothing when quiet, a bar on a terminal, lines elsewhere or without rich.

    `heading` is shown once, before anything else.
    """
    out = sys.stderr if stream is None else stream
    if quiet:
        return Quiet()
    if not out.isatty():
        return Lines(out, heading)
    try:
        return Bar(out, heading)
    except ImportError:
        print("no progress bar: rich is not installed (pip install 'ktlib[build]')", file=out)
        return Lines(out, heading)


def duration(seconds: float) -> str:
    """Spell a time span as a person would: `12 s`, `3:05 min`, `2:10 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def counted(count: int, noun: str) -> str:
    """Spell a count with its noun: `1 problem`, `3 problems`, `2 binaries`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("y") else f"{count} {noun}s"


def listed(problems: Sequence[Problem]) -> str:
    """Name the first few problems, and say how many more there are."""
    text = " ".join(str(problem) for problem in problems[:_SHOWN_PROBLEMS])
    more = len(problems) - _SHOWN_PROBLEMS
    return f"{text} and {more} more" if more > 0 else text


def unserved_text(unserved: Mapping[Problem, str]) -> str:
    """Name problems that no family serves, with each reason once."""
    reasons = "; ".join(dict.fromkeys(unserved.values()))
    return f"{counted(len(unserved), 'problem')}: {listed(list(unserved))} ({reasons})"


def _left(elapsed_s: float, made: int, total: int, wall_s: float | None) -> str:
    guesses = []
    if made:
        guesses.append(elapsed_s / made * (total - made))
    if wall_s is not None:
        guesses.append(max(0.0, wall_s - elapsed_s))
    return f"{duration(min(guesses))} left" if guesses else "time left unknown"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
