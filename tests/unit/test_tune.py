"""The tuning loop: nothing is measured twice, nothing is lost, and it ends when it is told to.

The worker answers from a table, so that the loop is tested and not the machine.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import pytest
from tune_fakes import DEVICE, PROBLEMS, TableWorker, run, space_size

from ktlib_generator.budget import Budget
from ktlib_generator.families.base import Device
from ktlib_generator.families.cpu_gemm import CpuGemm
from ktlib_generator.measure.jobs import Job, Outcome
from ktlib_generator.problems import Suite
from ktlib_generator.progress import Quiet
from ktlib_generator.run_dir import RunDir, merge_runs, records_of
from ktlib_generator.start import TuneError
from ktlib_generator.store.hdf5 import read_database
from ktlib_generator.values import Record, Status


@pytest.fixture
def paths(tmp_path):
    return {"run_dir": tmp_path / "run", "database": tmp_path / "db" / "cpu.h5"}


def test_every_candidate_of_every_problem_is_measured_once_and_saved(paths):
    worker = TableWorker()
    summary = run(paths, worker)
    expected = sum(space_size(problem) for problem in PROBLEMS)
    assert len(worker.jobs) == expected
    assert len({(job.problem, job.variant) for job in worker.jobs}) == expected
    database = read_database(paths["database"])
    assert len(database.records) == expected
    assert database.profile == DEVICE.profile
    assert summary.exit_code == 0
    assert summary.by_status == {"ok": expected}
    assert set(summary.winners) == set(PROBLEMS)
    assert worker.closed == 1


def test_winners_and_speedups_in_the_summary_are_those_of_the_records(paths):
    summary = run(paths)
    best = {p: max(r.speedup for r in records_of(paths["run_dir"]) if r.problem == p) for p in PROBLEMS}
    assert summary.winners == pytest.approx(best)
    assert f"geometric mean {summary.geomean:.3f}x the vendor (numpy)" in str(summary)


@pytest.mark.parametrize(("spread", "warned"), [(0.3, True), (0.15, False)])
def test_times_of_a_busy_machine_are_warned_of(paths, spread, warned):
    text = str(run(paths, TableWorker(spread=spread), budget=Budget(trials_per_problem=2)))
    assert ("measured noise up to 30%: the machine was busy; tune again when it is idle" in text) is warned


def test_order_is_random_but_the_same_for_a_seed(paths, tmp_path):
    orders = []
    for index, seed in enumerate((1, 1, 2)):
        worker = TableWorker()
        folder = tmp_path / str(index)
        run({"run_dir": folder / "run", "database": folder / "a.h5"}, worker, seed=seed)
        orders.append([(job.problem, job.variant) for job in worker.jobs])
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    space = list(CpuGemm().variants(PROBLEMS[0], DEVICE))
    assert [variant for problem, variant in orders[0] if problem == PROBLEMS[0]] != space


def test_failures_are_recorded_with_status_and_cost_nothing_else(paths):
    statuses = {2: Status.TIMEOUT, 5: Status.WRONG_RESULT, 8: Status.LAUNCH_ERROR}
    count = iter(range(10_000))
    worker = TableWorker(fails=lambda job: statuses.get(next(count)))
    summary = run(paths, worker, suite=Suite("one", "test", PROBLEMS[:1]))
    expected = space_size(PROBLEMS[0])
    assert summary.by_status == {
        "ok": expected - 3,
        "timeout": 1,
        "wrong_result": 1,
        "launch_error": 1,
    }
    assert summary.exit_code == 0


def test_all_candidates_failing_is_a_failed_run_without_winners(paths):
    summary = run(paths, TableWorker(fails=lambda job: Status.WRONG_RESULT))
    assert summary.exit_code == 1
    assert not summary.winners
    assert summary.failed == PROBLEMS
    assert len(read_database(paths["database"]).records) == sum(map(space_size, PROBLEMS))


def test_a_slower_kernel_leaves_the_problem_to_the_vendor(paths):
    summary = run(paths, TableWorker(baseline_us=5.0))
    assert summary.vendor == PROBLEMS
    assert "vendor wins  3 problems" in str(summary)
    assert summary.exit_code == 0


def test_trials_budget_is_per_problem_and_counts_earlier_runs(paths):
    first = run(paths, budget=Budget(trials_per_problem=3))
    assert first.new_trials == 9
    more = TableWorker()
    second = run(paths, more, budget=Budget(trials_per_problem=5), resume=True)
    assert second.new_trials == 6
    assert Counter(r.problem for r in records_of(paths["run_dir"])) == dict.fromkeys(PROBLEMS, 5)
    assert len({r.key for r in records_of(paths["run_dir"])}) == 15


def test_wall_budget_ends_the_run_and_every_problem_gets_a_share(paths):
    begin = time.monotonic()
    summary = run(paths, TableWorker(pause_s=0.05), budget=Budget(wall_s=0.9))
    assert time.monotonic() - begin < 5.0
    made = Counter(r.problem for r in records_of(paths["run_dir"]))
    assert set(made) == set(PROBLEMS)
    assert all(0 < made[p] < space_size(p) for p in PROBLEMS)
    assert summary.exit_code == 0


def test_a_used_run_directory_needs_resume(paths):
    run(paths, budget=Budget(trials_per_problem=1))
    with pytest.raises(TuneError, match=r"already holds 3 trials. Give --resume"):
        run(paths)


def test_resume_of_a_finished_run_measures_nothing(paths):
    run(paths)
    before = paths["database"].read_bytes()
    worker = TableWorker()
    summary = run(paths, worker, resume=True)
    assert worker.jobs == []
    assert summary.new_trials == 0
    assert summary.exit_code == 0
    assert paths["database"].read_bytes() == before


def test_two_runs_in_one_directory_are_refused(paths):
    with RunDir(paths["run_dir"], DEVICE.profile), pytest.raises(ValueError, match="another run is writing"):
        run(paths)


def test_unwritable_database_is_found_before_anything_is_measured(paths):
    paths["database"].parent.parent.joinpath("db").write_text("a file, not a folder")
    worker = TableWorker()
    with pytest.raises(ValueError, match=r"cannot write"):
        run(paths, worker)
    assert worker.jobs == []


def test_a_database_of_another_device_is_found_before_anything_is_measured(paths):
    run(paths, budget=Budget(trials_per_problem=1))
    other = Device("cpu", "another", "cpu-portable", 2)
    worker = TableWorker()
    with pytest.raises(ValueError, match="a database of cpu-x86_64_v3, this run is for cpu-portable"):
        run({**paths, "run_dir": paths["run_dir"].parent / "other"}, worker, device=other)
    assert worker.jobs == []


def test_a_signal_while_the_worker_is_closed_still_merges(paths):
    class Signalled(TableWorker):
        def close(self) -> None:
            super().close()
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    summary = run(paths, Signalled(), budget=Budget(trials_per_problem=1))
    assert summary.interrupted
    assert len(read_database(paths["database"]).records) == 3
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("signals", "saved"), [(1, True), (3, True), (4, False)])
def test_impatient_signals_do_not_lose_the_merge(paths, monkeypatch, signals, saved):
    """The first ends the search, the next two come while the merge runs; one more may end it."""

    class Signalled(TableWorker):
        def run(self, job: Job) -> Outcome:
            if len(self.jobs) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return super().run(job)

    def merge(*arguments):
        for _ in range(signals - 1):
            os.kill(os.getpid(), signal.SIGINT)
        return merge_runs(*arguments)

    monkeypatch.setattr("ktlib_generator.tune.merge_runs", merge)
    try:
        code = run(paths, Signalled()).exit_code
    except KeyboardInterrupt:
        code = None
    assert code == (130 if saved else None)
    assert paths["database"].exists() is saved
    assert len(records_of(paths["run_dir"])) == 2


def test_full_disk_stops_with_the_path_and_keeps_what_was_written(paths, monkeypatch):
    worker = TableWorker()
    original = RunDir.append

    def append(self, record: Record) -> None:
        if len(worker.jobs) > 4:
            raise OSError(28, "No space left on device", str(self.path))
        original(self, record)

    monkeypatch.setattr(RunDir, "append", append)
    with pytest.raises(OSError, match="No space left"):
        run(paths, worker)
    monkeypatch.undo()
    assert len(records_of(paths["run_dir"])) == 4
    assert worker.closed == 1
    assert run(paths, resume=True).exit_code == 0


def test_an_error_of_the_worker_itself_ends_the_run_and_closes_it(paths):
    class Broken(TableWorker):
        def run(self, job: Job) -> Outcome:
            raise RuntimeError("no child process starts")

    worker = Broken()
    with pytest.raises(RuntimeError, match="no child"):
        run(paths, worker)
    assert worker.closed == 1


def test_strategy_is_told_every_record_and_never_asked_for_more_than_the_budget(paths, monkeypatch):
    from ktlib_generator.search.exhaustive import Exhaustive

    asked, told = [], []

    class Spy(Exhaustive):
        def ask(self, n: int):
            answer = super().ask(n)
            asked.extend(answer)
            return answer

        def tell(self, record: Record) -> None:
            told.append(record.variant)

    monkeypatch.setattr("ktlib_generator.tune.make_strategy", lambda name: Spy())
    run(paths, suite=Suite("one", "test", PROBLEMS[:1]), budget=Budget(trials_per_problem=6))
    assert len(asked) == 6
    assert sorted(map(str, told)) == sorted(map(str, asked))


def test_a_strategy_that_waits_for_answers_is_asked_again(paths, monkeypatch):
    """An empty answer while something is untold means wait, not end: a learner has to see its generation."""
    from ktlib_generator.search.exhaustive import Exhaustive

    class Generations(Exhaustive):
        untold = 0

        def ask(self, n: int):
            if self.untold:
                return []
            answer = super().ask(min(n, 3))
            self.untold = len(answer)
            return answer

        def tell(self, record: Record) -> None:
            self.untold -= 1

    monkeypatch.setattr("ktlib_generator.tune.make_strategy", lambda name: Generations())
    worker = TableWorker()
    run(paths, worker, suite=Suite("one", "test", PROBLEMS[:1]))
    assert len(worker.jobs) == space_size(PROBLEMS[0])


def test_progress_is_ended_whatever_happens(paths):
    class Recorder(Quiet):
        ended = 0

        def trial(self, record: Record) -> None:
            raise OSError("terminal gone")

        def end(self) -> None:
            self.ended += 1

    progress = Recorder()
    with pytest.raises(OSError, match="terminal gone"):
        run(paths, progress=progress)
    assert progress.ended == 1


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("300s", Budget(None, 300.0)),
        ("2h", Budget(None, 7200.0)),
        ("20/problem", Budget(20, None)),
        ("1.5m,7/problem", Budget(7, 90.0)),
        ("none", Budget()),
    ],
)
def test_budget_forms(text, budget):
    assert Budget.parse(text) == budget
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize(
    "text", ["", "20", "20/problems", "-5s", "0s", "0/problem", "1h,2h", "5 parsecs", "1e99s"]
)
def test_budget_errors_name_the_text(text):
    with pytest.raises(ValueError, match="budget"):
        Budget.parse(text)
