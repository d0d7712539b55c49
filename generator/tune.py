"""The tuning loop: strategy -> build -> worker -> record -> journal, for every problem, then the merge.

Must not pick winners, time anything itself, or run a candidate in this process.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
from ktlib_generator.problems import Suite
from ktlib_generator.progress import Progress, Quiet, counted
from ktlib_generator.run_dir import RunDir, check_database, merge_runs
from ktlib_generator.search.registry import strategy as make_strategy
from ktlib_generator.start import (
    Space,
    TuneError,
    needs_compiler,
    protocol_for,
    require_one_protocol,
    spaces_of,
    why_unserved,
)
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
    the summary says `interrupted`. A run that is refused writes nothing.

    Raises:
        TuneError: no family serves the device or any of the problems, the run directory holds a run and
            `resume` is not set, or that run took its times under another protocol.
        ToolchainError: something has to be compiled and there is no compiler.
        StoreError: a path cannot be written; records written before are safe.
    """
    begin_s = time.monotonic()
    tools = Tools.real(device, options) if tools is None else tools
    if not tools.families:
        raise TuneError(f"no kernel family runs on {device.arch} ({device.name}); nothing to tune")
    protocol = protocol_for(device, options.protocol)
    spaces = spaces_of(tools.families, suite.problems, device)
    folder = RunDir(run_dir, device.profile)
    history = folder.records()
    if history and not resume:
        raise TuneError(
            f"{run_dir} already holds {counted(len(history), 'trial')}. Give --resume to go on with them, "
            "or another --run-dir to start anew"
        )
    if needs_compiler(spaces):
        nvcc.find_nvcc()
    history = current_records(history, tools.families)
    require_one_protocol(history, spaces, protocol, run_dir)
    check_database(database, device.profile)
    with Interrupts() as interrupts, folder:
        run = _Run(device, options, tools, folder, history, progress or Quiet(), interrupts)
        try:
            interrupted = run.search(spaces)
        except KeyboardInterrupt:
            interrupted = True
        # One Ctrl-C too many may end a merge that hangs; the database is replaced whole or not at all.
        interrupts.finish()
        records = folder.records()
        if records:
            merge_runs(database, [run_dir])
        return summarise(
            suite.problems,
            device,
            records,
            new_trials=run.trials,
            unserved=run.unserved,
            interrupted=interrupted,
            wall_s=time.monotonic() - begin_s,
            compile_s=run.compile_s,
            run_dir=run_dir,
            database=database if records else None,
        )


@dataclass(frozen=True)
class _Work:
    """One problem's share of a run: its space, the trials still to make, and those made before."""

    problem: Problem
    families: Space
    trials: int
    before: tuple[Record, ...]


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
        self.unserved: dict[Problem, str] = {}
        self._folder = folder
        self._progress = progress
        self._interrupts = interrupts

    def search(self, spaces: Mapping[Problem, Space]) -> bool:
        """Go through the problems; returns whether a signal ended it early."""
        works = self._plan(spaces)
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

    def _plan(self, spaces: Mapping[Problem, Space]) -> list[_Work]:
        made: dict[Problem, dict[Variant, Record]] = {problem: {} for problem in spaces}
        for record in self.history:
            if record.variant in spaces.get(record.problem, ()):
                made[record.problem][record.variant] = record
        works = []
        for problem, space in spaces.items():
            before = tuple(made[problem].values())
            trials = self.options.budget.trials_left(len(space), len(before))
            works.append(_Work(problem, space, trials, before))
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
                self._progress.problem(work.problem, trials=work.trials, before=work.before)
                note = ""
                if not work.families:
                    why = why_unserved(self.tools.families, work.problem, self.device)
                    self.unserved[work.problem] = why
                    note = f"{why}; the vendor serves it"
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
