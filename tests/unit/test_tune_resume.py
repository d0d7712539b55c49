"""A tuning run that is killed, interrupted or finished, and resumed: nothing twice, nothing lost.

The last test runs the CPU family for real.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from build_fakes import FakeFamily, compiles, install_nvcc, is_running, variant, wait_until
from tune_fakes import GPU, PROBLEMS, TableWorker, run, space_size

from ktlib import _core
from ktlib.problem import Problem
from ktlib_generator.budget import Budget
from ktlib_generator.problems import Suite
from ktlib_generator.run_dir import records_of
from ktlib_generator.store.hdf5 import read_database
from ktlib_generator.tune import TuneOptions, tune
from ktlib_generator.values import Status


@pytest.fixture
def paths(tmp_path):
    return {"run_dir": tmp_path / "run", "database": tmp_path / "db" / "cpu.h5"}


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from tune_fakes import TableWorker, run
paths = {{"run_dir": Path({run!r}), "database": Path({database!r})}}
summary = run(paths, TableWorker(pause_s=0.03), resume="--resume" in sys.argv)
print(summary)
raise SystemExit(summary.exit_code)
"""


@pytest.fixture
def start(paths):
    """Start a script that tunes into `paths`; it is killed at the end of the test if it is still there."""
    started: list[subprocess.Popen[str]] = []

    def start_one(script: str = CHILD, extra: dict[str, str] | None = None, **words: str):
        started.append(start_script(script, paths, extra or {}, **words))
        return started[-1]

    yield start_one
    for child in started:
        child.kill()
        child.communicate()


def start_script(script: str, paths, extra: dict[str, str], **words: str) -> subprocess.Popen[str]:
    here = str(Path(__file__).parents[1])
    code = script.format(here=here, run=str(paths["run_dir"]), database=str(paths["database"]), **words)
    environment = {**os.environ, **extra, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def wait_for_records(paths, count: int) -> None:
    journal = paths["run_dir"] / "journal.jsonl"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b"\n") > count:
            return
        time.sleep(0.01)
    raise AssertionError(f"no {count} records in {journal}")


def test_sigkill_half_way_then_resume_measures_nothing_twice(start, paths, tmp_path):
    child = start()
    wait_for_records(paths, 15)
    child.kill()
    child.communicate(timeout=20)
    kept = {r.key: r for r in records_of(paths["run_dir"])}
    assert 15 <= len(kept) < sum(map(space_size, PROBLEMS))
    worker = TableWorker()
    summary = run(paths, worker, resume=True)
    after = records_of(paths["run_dir"])
    assert len(after) == len({r.key for r in after}) == sum(map(space_size, PROBLEMS))
    assert {r.key: r for r in after}.items() >= kept.items(), "a record of the killed run was lost or redone"
    assert len(worker.jobs) == len(after) - len(kept)
    straight = run({"run_dir": tmp_path / "other", "database": tmp_path / "other.h5"})
    assert summary.winners == straight.winners


def test_sigkill_tears_at_most_the_line_in_flight(paths):
    run(paths, budget=Budget(trials_per_problem=2))
    # A killed run has merged nothing; a record that was merged stays, and measuring it anew adds another.
    paths["database"].unlink()
    journal = paths["run_dir"] / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-40])
    summary = run(paths, budget=Budget(trials_per_problem=2), resume=True)
    assert summary.new_trials == 1
    assert len(read_database(paths["database"]).records) == 6


def test_a_trial_measured_again_does_not_replace_the_one_merged_before(paths, monkeypatch):
    """The journal loses its last line after the merge, and the clock goes on: both records are true."""
    run(paths, budget=Budget(trials_per_problem=2))
    journal = paths["run_dir"] / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-40])
    now = time.time()
    monkeypatch.setattr("ktlib_generator.tune.time.time", lambda: now + 5)
    run(paths, budget=Budget(trials_per_problem=2), resume=True)
    records = read_database(paths["database"]).records
    assert (len(records), len({record.key for record in records})) == (7, 6)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_within_seconds_and_what_there_is_gets_merged(start, paths, number):
    child = start()
    wait_for_records(paths, 8)
    begin = time.monotonic()
    child.send_signal(number)
    out, err = child.communicate(timeout=20)
    assert time.monotonic() - begin < 5.0
    assert child.returncode == 130, err
    assert "interrupted: profile cpu-x86_64_v3" in out
    assert "--resume" in out
    records = records_of(paths["run_dir"])
    assert len(read_database(paths["database"]).records) == len(records) >= 8
    assert run(paths, resume=True).exit_code == 0


def test_a_changed_kernel_source_is_measured_again(paths, tmp_path, monkeypatch):
    """Times of a kernel that has been edited since say nothing about the one that would now be shipped."""
    for name, value in install_nvcc(tmp_path / "cuda", tmp_path / "compiles").items():
        monkeypatch.setenv(name, value)
    source = tmp_path / "src" / "kernel.cu"
    source.parent.mkdir()
    source.write_text("// kernel")
    family = FakeFamily(source, [variant("ok", 1), variant("ok", 2), variant("error", 3)])
    first = run(paths, device=GPU, family=family)
    assert first.by_status == {"ok": 6, "build_error": 3}
    assert run(paths, device=GPU, family=family, resume=True).new_trials == 0
    source.write_text("// kernel, edited")
    again = TableWorker()
    assert run(paths, again, device=GPU, family=family, resume=True).new_trials == 6
    assert run(paths, device=GPU, family=family, resume=True).new_trials == 0
    assert len(compiles(tmp_path / "compiles")) == 5


COMPILING = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from build_fakes import FakeFamily, variant
from tune_fakes import GPU, TableWorker, run
family = FakeFamily(Path({source!r}), [variant("ok", 1), variant("hang", 2), variant("hang", 3)])
paths = {{"run_dir": Path({run!r}), "database": Path({database!r})}}
raise SystemExit(run(paths, TableWorker(), device=GPU, family=family, jobs=3).exit_code)
"""


def test_a_signal_while_compiling_kills_every_compiler(start, paths, tmp_path):
    log = tmp_path / "compiles"
    environment = install_nvcc(tmp_path / "cuda", log)
    source = tmp_path / "kernel.cu"
    source.write_text("// kernel")
    child = start(COMPILING, environment, source=str(source))
    wait_for_records(paths, 1)
    assert wait_until(lambda: len(compiles(log)) == 3)
    begin = time.monotonic()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert time.monotonic() - begin < 5.0
    assert child.returncode == 130, err
    children = [int(pid) for pid in Path(f"{log}.children").read_text().split()]
    assert wait_until(lambda: not any(map(is_running, [*children, *compiles(log)])))
    records = read_database(paths["database"]).records
    assert [record.status for record in records] == [Status.OK], "a compiler that we killed left a record"
    assert read_database(paths["database"]).binaries


def test_cpu_family_end_to_end_on_this_machine(tmp_path, monkeypatch):
    """Real kernels in the real worker: verified, timed against NumPy, saved, and resumed without work."""
    arch = _core.cpu_archs()[0]
    monkeypatch.setenv("KTLIB_CACHE_DIR", str(tmp_path / "cache"))
    from ktlib_generator.measure.device import detect

    device = detect(arch)
    paths = {"run_dir": tmp_path / "run", "database": tmp_path / "cpu.h5"}
    suite = Suite("two", "test", (Problem(16, 16, 16, dtype="fp32"), Problem(7, 9, 5, "nt", "bf16")))
    options = TuneOptions(budget=Budget(trials_per_problem=3))
    summary = tune(suite, device, options, **paths)
    assert summary.by_status == {"ok": 6}
    records = read_database(paths["database"]).records
    assert all(r.baseline is not None and r.verification is not None for r in records)
    assert all(r.environment.arch == arch for r in records)
    again = tune(suite, device, replace(options, strategy="exhaustive"), resume=True, **paths)
    assert again.new_trials == 0
