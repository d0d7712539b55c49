"""What a tuning run came to: counts, winners by the packing policy, and where the vendor stays ahead.

Must not measure or write anything; the winners it counts are those that packing would take.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ktlib.problem import Problem
from ktlib_generator.families.base import Device
from ktlib_generator.pack import Policy, Winner, pick_winner
from ktlib_generator.progress import counted, duration, listed, unserved_text
from ktlib_generator.values import Record, Status

# Above it the samples say more about what else ran than about the kernels.
NOISY = 0.2


@dataclass(frozen=True)
class TuneSummary:
    """The outcome of one run over everything its directory holds for the suite.

    `winners` has the problems a kernel of ours wins; `vendor` those where it loses, or wins by no more
    than the noise; `failed` those where no candidate was right; `unserved` those no family can serve, with
    the reason. `baselines` are the vendor methods that the winners beat; `noise` is the largest of those
    that decided a problem. `database` is None when nothing was saved.
    """

    profile: str
    problems: int
    new_trials: int
    by_status: dict[str, int]
    winners: dict[Problem, float]
    vendor: tuple[Problem, ...]
    failed: tuple[Problem, ...]
    unserved: dict[Problem, str]
    untouched: tuple[Problem, ...]
    baselines: tuple[str, ...]
    noise: float
    interrupted: bool
    wall_s: float
    compile_s: float
    run_dir: Path
    database: Path | None
    next_command: str

    @property
    def geomean(self) -> float | None:
        """Geometric mean of the winners' speed-up over the interleaved baseline; None without winners."""
        if not self.winners:
            return None
        return math.exp(sum(math.log(value) for value in self.winners.values()) / len(self.winners))

    @property
    def exit_code(self) -> int:
        """0 when something usable was saved, 130 after Ctrl-C, 1 when nothing was or all failed."""
        if self.interrupted:
            return 130
        return 0 if self.database is not None and self.by_status.get(Status.OK.value) else 1

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterable[str]:
        total = sum(self.by_status.values())
        counts = ", ".join(f"{count} {status}" for status, count in sorted(self.by_status.items()))
        yield f"{'interrupted' if self.interrupted else 'done'}: profile {self.profile}"
        yield f"problems     {self.problems}" + (
            f" ({len(self.untouched)} not begun)" if self.untouched else ""
        )
        yield f"trials       {total}" + (f" ({counts}); {self.new_trials} new" if total else "")
        if self.geomean is not None:
            won = counted(len(self.winners), "problem")
            against = f"the vendor ({', '.join(self.baselines)})"
            yield f"kernels win  {won}, geometric mean {self.geomean:.3f}x {against}"
        for label, problems in (("vendor wins", self.vendor), ("none right", self.failed)):
            if problems:
                why = " (faster, or within the noise)" if label == "vendor wins" else ""
                yield f"{label:<12} {counted(len(problems), 'problem')}{why}: {listed(problems)}"
        if self.unserved:
            yield f"no kernel    {unserved_text(self.unserved)}"
        if self.noise > NOISY:
            yield (
                f"warning      measured noise up to {self.noise:.0%}: the machine was busy; "
                "tune again when it is idle, with another --run-dir"
            )
        yield f"time         {duration(self.wall_s)}, of it compilers {duration(self.compile_s)}"
        yield f"run          {self.run_dir}"
        yield f"database     {self.database or 'not written: no trial was saved'}"
        yield f"next         {self.next_command}"


def summarise(
    problems: Sequence[Problem],
    device: Device,
    records: Sequence[Record],
    *,
    new_trials: int,
    unserved: Mapping[Problem, str],
    interrupted: bool,
    wall_s: float,
    compile_s: float,
    run_dir: Path,
    database: Path | None,
) -> TuneSummary:
    """Count the records of `problems`, and pick winners as packing will."""
    by_problem: dict[Problem, list[Record]] = {problem: [] for problem in problems}
    for record in records:
        if record.problem in by_problem:
            by_problem[record.problem].append(record)
    chosen = {problem: pick_winner(found, Policy()) for problem, found in by_problem.items() if found}
    winners = {p: _speedup(winner) for p, winner in chosen.items() if winner and winner.record is not None}
    won = [winner.record for winner in chosen.values() if winner is not None and winner.record is not None]
    return TuneSummary(
        profile=device.profile,
        problems=len(by_problem),
        new_trials=new_trials,
        by_status=dict(Counter(r.status.value for found in by_problem.values() for r in found)),
        winners=winners,
        vendor=tuple(p for p, winner in chosen.items() if winner is not None and winner.record is None),
        failed=tuple(p for p, winner in chosen.items() if winner is None),
        unserved=dict(unserved),
        untouched=tuple(p for p, found in by_problem.items() if not found and p not in unserved),
        baselines=tuple(sorted({r.baseline.method for r in won if r.baseline is not None})),
        noise=max((winner.noise for winner in chosen.values() if winner is not None), default=0.0),
        interrupted=interrupted,
        wall_s=wall_s,
        compile_s=compile_s,
        run_dir=run_dir,
        database=database,
        next_command=_next_command(database, run_dir, interrupted=interrupted),
    )


def _speedup(winner: Winner) -> float:
    return winner.vendor_us / winner.latency_us


def _next_command(database: Path | None, run_dir: Path, *, interrupted: bool) -> str:
    if interrupted:
        return f"the same command with --resume --run-dir {run_dir} goes on where this one stopped"
    if database is None:
        return "ktlib-build tune --dry-run shows what would be tried"
    return f"ktlib-build pack {database}"
