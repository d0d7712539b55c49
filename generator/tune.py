"""The tuning loop: strategy -> build -> worker -> record -> journal, for every problem, then the merge.

Must not pick winners, time anything itself, or run a candidate in this process.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ktlib.problem import Problem
from ktlib_generator.budget import Budget
from ktlib_generator.build import nvcc
from ktlib_generator.build.builder import BUILD_TIMEOUT_S, BuildPool, BuildResult, default_jobs
from ktlib_generator.build.cache import BinaryCache
from ktlib_generator.families.base import Device, Family
from ktlib_generator.history import current_records
from ktlib_generator.interrupts import Interrupts
from ktlib_generator.measure.jobs import Job, Limits, Outcome
from ktlib_generator.measure.timer import PROTOCOLS
from ktlib_generator.problems import Suite
from ktlib_generator.progress import Progress, Quiet
from ktlib_generator.run_dir import RunDir, check_database, merge_runs
from ktlib_generator.search.registry import strategy as make_strategy
from ktlib_generator.summary import TuneSummary, summarise
from ktlib_generator.values import (
    Binary,
    BuildFailure,
    Environment,
    Record,
    Status,
    Variant,
)

BATCH = 8


class TuneError(ValueError):
    """The run cannot start as asked; the message says what to change."""


class MeasuringWorker(Protocol):
    """What the loop needs of a worker; `ktlib_generator.measure.worker.Worker` is one."""

    def run(self, job: Job) -> Outcome:
        """Verify and time one candidate; whatever it does, an outcome comes back."""
        ...

    def close(self) -> None:
        """End the child at once, also in the middle of a job."""
        ...


@dataclass(frozen=True)
class TuneOptions:
    """What a user may choose of a run."""

    strategy: str = "exhaustive"
    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    protocol: str = ""
    jobs: int = 0
    batch: int = BATCH
    build_timeout_s: float = BUILD_TIMEOUT_S
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Tools:
    """What a run works with; tests give their own."""

    families: Sequence[Family]
    environment: Environment
    worker: Callable[[], MeasuringWorker]
    cache: BinaryCache

    @classmethod
    def real(cls, device: Device, options: TuneOptions) -> Tools:
        """Return the families, the worker and the cache of this machine."""
        from ktlib_generator.families.registry import families_for
        from ktlib_generator.measure.device import environment
        from ktlib_generator.measure.worker import Worker

        return cls(
            families=tuple(families_for(device)),
            environment=environment(device),
            worker=lambda: Worker(device, options.limits),
            cache=BinaryCache.default(),
        )


def tune(
    suite: Suite,
    device: Device,
    options: TuneOptions,
    *,
    run_dir: Path,
    database: Path,
    resume: bool = False,
    progress: Progress | None = None,
    tools: Tools | None = None,
) -> TuneSummary:
    """Tune every problem of `suite` on `device`, journal each trial at once, and merge into `database`.

    A trial that the run directory already has is never made again, unless the kernel's source has changed
    since. Ctrl-C and SIGTERM end the search within seconds, kill what was started, and go on to the merge;
    the summary says `interrupted`.

    Raises:
        TuneError: no family serves the device, or the run directory holds a run and `resume` is not set.
        ToolchainError: something has to be compiled and there is no compiler.
        StoreError: a path cannot be written; records written before are safe.
    """
    begin_s = time.monotonic()
    tools = Tools.real(device, options) if tools is None else tools
    if not tools.families:
        raise TuneError(f"no kernel family runs on {device.arch} ({device.name}); nothing to tune")
    protocol_for(device, options.protocol)
    check_database(database, device.profile)
    folder = RunDir(run_dir, device.profile)
    history = folder.records()
    if history and not resume:
        raise TuneError(
            f"{run_dir} already holds {len(history)} trials. Give --resume to go on with them, "
            "or another --run-dir to start anew"
        )
    with Interrupts() as interrupts, folder:
        history = current_records(history, tools.families)
        run = _Run(device, options, tools, folder, history, progress or Quiet(), interrupts)
        try:
            interrupted = run.search(suite.problems)
        except KeyboardInterrupt:
            interrupted = True
        # A second Ctrl-C may end a merge that takes too long; the database is replaced whole or not at all.
        interrupts.rearm()
        records = folder.records()
        if records:
            merge_runs(database, [run_dir])
    return summarise(
        suite.problems,
        device,
        records,
        new_trials=run.trials,
        unserved=tuple(run.unserved),
        interrupted=interrupted,
        wall_s=time.monotonic() - begin_s,
        compile_s=run.compile_s,
        run_dir=run_dir,
        database=database if records else None,
    )


def protocol_for(device: Device, wanted: str = "") -> str:
    """Return the timing protocol to use: the wanted one, or the first of the device's kind.

    Raises:
        TuneError: the device's kind has no such protocol.
    """
    have = PROTOCOLS[device.kind]
    if wanted and wanted not in have:
        raise TuneError(f"protocol {wanted!r} is unknown for {device.profile} (have: {', '.join(have)})")
    return wanted or have[0]


def needs_compiler(families: Sequence[Family], problems: Sequence[Problem], device: Device) -> bool:
    """Say whether any candidate has to be compiled at all (a kernel in the extension has not)."""
    return any(
        family.build_request(variant) is not None
        for family in families
        for problem in problems
        for variant in _first(family, problem, device)
    )


def space_of(families: Sequence[Family], problem: Problem, device: Device) -> list[tuple[Variant, Family]]:
    """Return every legal variant for a problem with its family, in a fixed order."""
    return [(variant, family) for family in families for variant in family.variants(problem, device)]


def _first(family: Family, problem: Problem, device: Device) -> list[Variant]:
    return [variant for variant, _ in zip(family.variants(problem, device), range(1), strict=False)]


@dataclass(frozen=True)
class _Work:
    """One problem's share of a run: its space, the trials still to make, and those made before."""

    problem: Problem
    families: dict[Variant, Family]
    trials: int
    made: int


class _Run:
    """One run of the loop over all problems; the only writer of the journal."""

    def __init__(
        self,
        device: Device,
        options: TuneOptions,
        tools: Tools,
        folder: RunDir,
        history: list[Record],
        progress: Progress,
        interrupts: Interrupts,
    ) -> None:
        self.device = device
        self.options = options
        self.tools = tools
        self.history = history
        self.strategy = make_strategy(options.strategy)
        self.protocol = protocol_for(device, options.protocol)
        self.trials = 0
        self.compile_s = 0.0
        self.unserved: list[Problem] = []
        self._folder = folder
        self._progress = progress
        self._interrupts = interrupts

    def search(self, problems: Sequence[Problem]) -> bool:
        """Go through the problems; returns whether a signal ended it early."""
        if needs_compiler(self.tools.families, problems, self.device):
            nvcc.find_nvcc()
        works = self._plan(problems)
        worker: MeasuringWorker | None = None
        try:
            worker = self.tools.worker()
            self._progress.begin(
                problems=len(works),
                trials=sum(work.trials for work in works),
                wall_s=self.options.budget.wall_s,
            )
            self._search(works, worker)
            return False
        except KeyboardInterrupt:
            return True
        finally:
            # A signal that comes in here is raised when the shield opens; tune() takes it.
            with self._interrupts.shield():
                if worker is not None:
                    worker.close()
                self._progress.end()

    def keep(self, record: Record) -> None:
        """Write one record, then let the strategy and the user know; a signal waits until it is done."""
        with self._interrupts.shield():
            self._folder.append(record)
            self.history.append(record)
            self.trials += 1
            self.strategy.tell(record)
            self._progress.trial(record)

    def _plan(self, problems: Sequence[Problem]) -> list[_Work]:
        made: dict[Problem, set[Variant]] = {problem: set() for problem in problems}
        for record in self.history:
            if record.problem in made:
                made[record.problem].add(record.variant)
        works = []
        for problem, tried in made.items():
            families = dict(space_of(self.tools.families, problem, self.device))
            old = sum(variant in tried for variant in families)
            trials = self.options.budget.trials_left(len(families), old)
            works.append(_Work(problem, families, trials, old))
        return works

    def _search(self, works: Sequence[_Work], worker: MeasuringWorker) -> None:
        begin_s = time.monotonic()
        options = self.options
        jobs = options.jobs or default_jobs()
        with BuildPool(self.tools.cache, jobs=jobs, timeout_s=options.build_timeout_s) as pool:
            for index, work in enumerate(works):
                share_s = options.budget.share_s(
                    elapsed_s=time.monotonic() - begin_s, problems_left=len(works) - index
                )
                self._progress.problem(work.problem, trials=work.trials, made=work.made)
                note = ""
                if not work.families:
                    self.unserved.append(work.problem)
                    note = "no family has a legal variant, the vendor serves it"
                try:
                    left = _ProblemSearch(self, work, pool, worker, share_s).run() if work.trials else 0
                finally:
                    self.compile_s = pool.compile_s
                if left and self._late(begin_s):
                    note = "time budget used up"
                self._progress.problem_done(work.problem, skipped_trials=left, note=note)

    def _late(self, begin_s: float) -> bool:
        wall_s = self.options.budget.wall_s
        return wall_s is not None and time.monotonic() - begin_s >= wall_s


class _ProblemSearch:
    """The trials of one problem: the next batch compiles while this one is measured."""

    def __init__(
        self, run: _Run, work: _Work, pool: BuildPool, worker: MeasuringWorker, share_s: float | None
    ) -> None:
        self._run = run
        self._work = work
        self._pool = pool
        self._worker = worker
        self._unasked = work.trials
        # One a problem, so that the worker keeps inputs and references; nobody can know it beforehand.
        self._data_seed = secrets.randbits(31)
        self._deadline_s = None if share_s is None else time.monotonic() + share_s
        self._queue: deque[tuple[Variant, Future[BuildResult]]] = deque()

    def run(self) -> int:
        """Make the trials; returns how many of them were left unmade."""
        run, work = self._run, self._work
        run.strategy.start(work.problem, list(work.families), tuple(run.history), run.options.seed)
        try:
            while self._refill() and not self._is_late():
                ready = self._next_ready()
                if ready is None:
                    break
                run.keep(self._trial(*ready))
        finally:
            for _, future in self._queue:
                future.cancel()
        return self._unasked + len(self._queue)

    def _refill(self) -> bool:
        batch = self._run.options.batch
        # Two batches in flight: the one being measured, and the one compiling behind it.
        while len(self._queue) <= batch and self._unasked:
            asked = self._run.strategy.ask(min(batch, self._unasked))
            if not asked:
                break
            self._unasked -= len(asked)
            self._queue.extend((v, self._pool.submit(v, self._work.families[v])) for v in asked)
        return bool(self._queue)

    def _is_late(self) -> bool:
        return self._deadline_s is not None and time.monotonic() >= self._deadline_s

    def _next_ready(self) -> tuple[Variant, BuildResult] | None:
        """Take the first candidate whose build is done; None when the budget ends while all compile."""
        limit_s = None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())
        wait([future for _, future in self._queue], timeout=limit_s, return_when=FIRST_COMPLETED)
        for item in self._queue:
            variant, future = item
            if future.done():
                self._queue.remove(item)
                return variant, future.result()
        return None

    def _trial(self, variant: Variant, built: BuildResult) -> Record:
        if isinstance(built, BuildFailure):
            log = f"{built.reason}\n{built.log}".rstrip()
            return self._record(variant, Outcome(status=Status.BUILD_ERROR, log=log), None)
        family = self._work.families[variant]
        job = Job(
            problem=self._work.problem,
            variant=variant,
            facts=family.kernel_facts(variant, built),
            binary=built,
            protocol=self._run.protocol,
            launch=family.launch_parameters(variant),
            seed=self._data_seed,
        )
        return self._record(variant, self._worker.run(job), built)

    def _record(self, variant: Variant, outcome: Outcome, binary: Binary | None) -> Record:
        return Record(
            problem=self._work.problem,
            variant=variant,
            environment=self._run.tools.environment,
            status=outcome.status,
            measured_unix=int(time.time()),
            measurement=outcome.measurement,
            baseline=outcome.baseline,
            verification=outcome.verification,
            binary=binary,
            log=outcome.log,
        )
