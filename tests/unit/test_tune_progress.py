"""What a user sees of a run: one line a problem or a bar, true also of what earlier runs did."""

from __future__ import annotations

import io
import re
import sys

import pytest
from tune_fakes import PROBLEMS, TableWorker, run, space_size

from ktlib.problem import Problem
from ktlib_generator.budget import Budget
from ktlib_generator.problems import Suite
from ktlib_generator.progress import Lines, counted, make_progress
from ktlib_generator.values import Status


@pytest.fixture
def paths(tmp_path):
    return {"run_dir": tmp_path / "run", "database": tmp_path / "db" / "cpu.h5"}


def test_lines_of_a_resumed_run_tell_what_the_journal_knows(paths, capsys):
    """A finished problem is not "no kernel, 0 ok", and the best of a half-done one counts what was before."""
    count = iter(range(1000))
    first = TableWorker(fails=lambda job: Status.TIMEOUT if next(count) == 1 else None)
    run(paths, first, suite=Suite("one", "test", PROBLEMS[:1]))
    half = Suite("one", "test", PROBLEMS[1:2])
    run(paths, TableWorker(baseline_us=99.0), suite=half, budget=Budget(trials_per_problem=2), resume=True)
    run(paths, suite=Suite("two", "test", PROBLEMS[:2]), resume=True, progress=Lines(sys.stdout, "a heading"))
    lines = capsys.readouterr().out.splitlines()
    sizes = [space_size(problem) for problem in PROBLEMS[:2]]
    assert lines[:2] == ["a heading", f"tuning 2 problems, up to {sizes[1] - 2} trials"]
    assert lines[2] == f"[1/2] {PROBLEMS[0]}: done before ({sizes[0] - 1} ok, 1 failed), best 2.00x"
    done = re.fullmatch(r"\[2/2\] .*: best (.*)x, (\d+) ok, 0 failed, \d+ s \(2 ok before\)", lines[3])
    assert done is not None, lines[3]
    assert float(done.group(1)) > 2.0, "the best was among the trials made before"
    assert int(done.group(2)) == sizes[1] - 2


def test_a_line_of_a_problem_that_nothing_serves_has_the_reason(paths, capsys):
    batched = Problem(32, 32, 32, dtype="fp32", batch=3)
    run(paths, suite=Suite("two", "test", (batched, PROBLEMS[0])), progress=Lines(sys.stdout))
    reason = "cpu_gemm: one call computes one product (batch 1); the vendor serves it"
    assert f"[1/2] {batched}: no kernel ({reason})" in capsys.readouterr().out.splitlines()


def test_counts_of_one_are_singular(paths, capsys):
    one = Suite("one", "test", PROBLEMS[:1])
    text = str(run(paths, suite=one, budget=Budget(trials_per_problem=1), progress=Lines(sys.stdout)))
    assert "kernels win  1 problem, " in text
    assert capsys.readouterr().out.startswith("tuning 1 problem, up to 1 trial\n")
    assert counted(2, "binary") == "2 binaries"


def test_lines_have_one_for_each_problem_and_the_best_so_far(paths, capsys):
    run(paths, progress=Lines(sys.stdout))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"tuning 3 problems, up to {sum(map(space_size, PROBLEMS))} trials"
    assert [line.split()[1].rstrip(":") for line in lines[1:]] == [
        f"{p.m}x{p.n}x{p.k}:nn:fp32" for p in PROBLEMS
    ]
    assert "best 2.00x" in lines[1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_shows_problem_best_counts_and_time_left(paths):
    pytest.importorskip("rich")
    terminal = Terminal()
    count = iter(range(1000))
    worker = TableWorker(pause_s=0.01, fails=lambda job: Status.TIMEOUT if next(count) == 1 else None)
    run(paths, worker, progress=make_progress(quiet=False, stream=terminal))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    total = sum(map(space_size, PROBLEMS))
    for word in (
        str(PROBLEMS[-1]),
        f"{total}/{total}",
        "best 2.00x all 2.00x",
        f"{total - 1} ok",
        "1 failed",
    ):
        assert word in text
    assert re.search(r"\d+ s, \d+ s left", text)


def test_quiet_shows_nothing(paths, capsys):
    run(paths, progress=make_progress(quiet=True))
    assert capsys.readouterr() == ("", "")
