"""What `compare` finds and what it leaves alone: planted slowdowns, planted clocks, noise, stalls."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from report_cases import ENVIRONMENT, METHODS, PROBLEMS, line, run, us_of, write

from ktlib.problem import Problem
from ktlib_generator.report import Comparison, compare, read_result

Main = Callable[[list[str]], int]


@pytest.fixture
def main(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Main:
    monkeypatch.syspath_prepend(checkout)
    called: Main = importlib.import_module("benchmarks.__main__").main
    return called


def compared(a: Path, b: Path, **options: bool) -> Comparison:
    return compare(read_result(a), read_result(b), **options)


def moved(found: Comparison, verdict: str = "slower") -> set[tuple[str, str]]:
    return {(change.method, change.flop_class) for change in found.changes if change.verdict == verdict}


@pytest.mark.parametrize("seed", range(20))
def test_two_runs_of_the_same_code_differ_by_noise_alone(tmp_path: Path, seed: int) -> None:
    found = compared(run(tmp_path / "a.csv", 2 * seed), run(tmp_path / "b.csv", 2 * seed + 1))
    assert found.regressions == ()
    assert found.warnings == ()
    assert found.pairs == len(PROBLEMS) * len(METHODS)


@pytest.mark.parametrize("method", ["ktlib", "torch", "cublaslt_heuristic"])
def test_a_method_that_became_5_percent_slower_is_found_and_named(tmp_path: Path, method: str) -> None:
    # What makes torch slower makes its repeat slower; that must not hide it.
    slow = {method, "control"} if method == "torch" else {method}
    planted = run(tmp_path / "b.csv", 1, slower=lambda _, name: 1.05 if name in slow else 1.0)
    found = compared(run(tmp_path / "a.csv"), planted)
    classes = ("< 0.5", "0.5 to 8", "8 to 140", "> 140", "all")
    assert {(method, label) for label in classes} <= moved(found)
    (total,) = [c for c in found.changes if c.method == method and c.flop_class == "all"]
    assert total.ratio == pytest.approx(1.05, abs=0.004)
    if method == "ktlib":
        assert {name for name, _ in moved(found)} == {"ktlib"}
        assert all(text.startswith("ktlib (small, graph-hot)") for text in found.regressions)


def test_a_slower_baseline_neither_hides_what_we_did_nor_makes_us_guilty(tmp_path: Path) -> None:
    for factor, ours in ((1.05, 1.0), (0.95, 1.0), (1.05, 1.03)):
        planted = {"torch": factor, "control": factor, "ktlib": ours}
        b = run(tmp_path / "b.csv", 1, slower=lambda _, name, by=planted: by.get(name, 1.0))
        found = compared(run(tmp_path / "a.csv"), b)
        verdicts = {(c.method, c.verdict) for c in found.changes if c.flop_class == "all"}
        assert ("ktlib", "slower" if ours > 1 else "same") in verdicts
        assert ("ktlib_own", "same") in verdicts
        assert any("moved apart (torch " in text for text in found.warnings)


def test_a_baselines_own_repeat_does_not_excuse_it(tmp_path: Path) -> None:
    methods = ("ktlib", "torch", "control")
    b = run(tmp_path / "b.csv", 1, slower=lambda _, m: 1.0 if m == "ktlib" else 1.05, methods=methods)
    assert ("torch", "all") in moved(compared(run(tmp_path / "a.csv", methods=methods), b))


def test_a_slowdown_in_one_class_is_found_there(tmp_path: Path) -> None:
    planted = run(
        tmp_path / "b.csv", 1, slower=lambda p, name: 1.05 if name == "ktlib" and p.flops > 140e9 else 1.0
    )
    found = moved(compared(run(tmp_path / "a.csv"), planted))
    assert ("ktlib", "> 140") in found
    assert not {("ktlib", "< 0.5"), ("ktlib", "0.5 to 8"), ("ktlib", "8 to 140")} & found


def test_a_speed_up_is_said_and_is_no_regression(tmp_path: Path) -> None:
    planted = run(tmp_path / "b.csv", 1, slower=lambda _, name: 0.9 if name == "ktlib" else 1.0)
    found = compared(run(tmp_path / "a.csv"), planted)
    assert ("ktlib", "all") in moved(found, "faster")
    assert found.regressions == ()


def test_a_lower_clock_is_flagged_and_is_nobodys_regression(tmp_path: Path) -> None:
    cool = {**ENVIRONMENT, "clock_sm_mhz": "1740"}
    b = run(tmp_path / "b.csv", 1, slower=lambda *_: 1.09, environment=cool)
    found = compared(run(tmp_path / "a.csv"), b)
    assert found.regressions == ()
    assert any(text.startswith("clock_sm_mhz dropped by 7.9%") for text in found.warnings)
    assert any(re.search(r"every baseline is slower in B, by (8\.[5-9]|9)", text) for text in found.warnings)
    assert len(compared(tmp_path / "a.csv", b, absolute=True).regressions) >= 15


def test_a_slowdown_of_ours_is_found_behind_a_clock_drop(tmp_path: Path) -> None:
    cool = {**ENVIRONMENT, "clock_sm_mhz": "1740"}
    b = run(
        tmp_path / "b.csv",
        1,
        slower=lambda _, name: 1.09 * (1.05 if name == "ktlib" else 1),
        environment=cool,
    )
    found = compared(run(tmp_path / "a.csv"), b)
    assert {name for name, _ in moved(found)} == {"ktlib"}
    (total,) = [c for c in found.changes if (c.method, c.flop_class) == ("ktlib", "all")]
    assert total.relative == pytest.approx(1.05, abs=0.004)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"clock_memory_mhz": "2619"}, None),
        ({"power_limit_w": "500.0"}, "power_limit_w differs: 700.0 in A, 500.0 in B"),
        ({"device": "NVIDIA H100"}, "device differs: NVIDIA H200 in A, NVIDIA H100 in B"),
        ({"throttle_reasons": "sw_power_cap"}, "B was measured under throttling"),
        ({"throttle_reasons": "none"}, None),
        ({"clock_sm_mhz": "1870"}, None),
    ],
)
def test_what_the_headers_say_of_the_machine_is_warned_of(
    tmp_path: Path, change: dict[str, str], says: str | None
) -> None:
    b = run(tmp_path / "b.csv", 1, environment={**ENVIRONMENT, **change})
    found = compared(run(tmp_path / "a.csv"), b)
    assert [says in text for text in found.warnings] == [True] if says else found.warnings == ()


def test_a_new_library_or_commit_is_noted(tmp_path: Path) -> None:
    b = run(tmp_path / "b.csv", 1, environment={**ENVIRONMENT, "torch": "2.13.0", "commit": "abc"})
    notes = compared(run(tmp_path / "a.csv"), b).notes
    assert notes == ("torch: 2.11.0 in A, 2.13.0 in B", "commit: 3673d99 in A, abc in B")


def test_one_stalled_problem_is_listed_and_is_no_regression(tmp_path: Path) -> None:
    stalled = PROBLEMS[17]
    b = run(tmp_path / "b.csv", 1, slower=lambda p, name: 1.3 if (p, name) == (stalled, "ktlib") else 1.0)
    found = compared(run(tmp_path / "a.csv"), b)
    assert [(one.problem, one.method) for one in found.slowed] == [(str(stalled), "ktlib")]
    assert found.regressions == ()


def test_several_slow_problems_are_a_regression_even_where_the_mean_hides_them(tmp_path: Path) -> None:
    slow = PROBLEMS[::10]
    b = run(
        tmp_path / "b.csv",
        1,
        slower=lambda p, name: (1.15 if p in slow else 0.98) if name == "ktlib" else 1.0,
    )
    found = compared(run(tmp_path / "a.csv"), b)
    assert ("ktlib", "all") not in moved(found)
    assert f"ktlib (small, graph-hot): 4 of {len(PROBLEMS)} problems slower" in found.regressions


def test_noisy_columns_raise_what_counts_as_a_change(tmp_path: Path) -> None:
    few = PROBLEMS[:1]

    def times(name: str, spread: float, us: float) -> Path:
        rows = [
            line(p, m, us if m == "ktlib" else 5.0, spread=spread) for p in few for m in ("ktlib", "torch")
        ]
        return write(tmp_path / name, rows)

    quiet = compared(times("a.csv", 0.002, 5.0), times("b.csv", 0.002, 5.25))
    assert ("ktlib", "all") in moved(quiet)
    loud = compared(times("c.csv", 0.1, 5.0), times("d.csv", 0.1, 5.25))
    assert moved(loud) == set()


def test_a_straying_control_raises_what_counts_as_a_change(tmp_path: Path) -> None:
    def times(name: str, strays: float, ours: float) -> Path:
        rows = []
        for at, p in enumerate(PROBLEMS[:4]):
            us = us_of(p, "torch")
            rows += [line(p, "torch", us), line(p, "control", us * (1 + strays * (-1) ** at))]
            rows += [line(p, "ktlib", us * ours)]
        return write(tmp_path / name, rows)

    assert ("ktlib", "all") in moved(compared(times("a.csv", 0.002, 1.0), times("b.csv", 0.002, 1.04)))
    assert moved(compared(times("c.csv", 0.1, 1.0), times("d.csv", 0.1, 1.04))) == set()


def test_a_problem_that_fails_now_is_a_regression_and_rows_without_a_partner_are_counted(
    tmp_path: Path,
) -> None:
    p, q = PROBLEMS[:2]
    a = write(tmp_path / "a.csv", [line(p, "ktlib", 1.0), line(p, "torch", 1.0), line(q, "torch", 1.0)])
    b = write(tmp_path / "b.csv", [line(p, "ktlib", "", status="wrong_result"), line(p, "torch", 1.0)])
    found = compared(a, b)
    assert found.regressions == (f"failed: {p} by ktlib: wrong_result in B",)
    assert (found.only_a, found.only_b, found.pairs) == (1, 0, 1)


def test_the_command_says_it_and_exits_by_it(
    tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    a = run(tmp_path / "a.csv")
    b = run(tmp_path / "b.csv", 1, slower=lambda _, name: 1.05 if name == "ktlib" else 1.0)
    assert main(["compare", str(a), str(a)]) == 0
    assert "no regression beyond the noise" in capsys.readouterr().out
    assert main(["compare", str(a), str(b)]) == 1
    text = capsys.readouterr().out
    assert "B is worse than A" in text
    assert "ktlib (small, graph-hot), class all: +5." in text
    assert main(["compare", str(b), str(a)]) == 0
    capsys.readouterr()
    assert main(["compare", "--json", str(a), str(b)]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["a"] == str(a)
    assert data["regressions"]
    assert {change["verdict"] for change in data["changes"]} == {"slower", "same"}
    assert main(["compare", "--tolerance", "0.08", str(a), str(b)]) == 0


def test_files_that_cannot_be_compared_exit_with_2_and_say_why(
    tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    a = run(tmp_path / "a.csv")
    other = write(tmp_path / "other.csv", [line(Problem(3, 3, 3), "torch", 1.0)])
    broken = tmp_path / "broken.csv"
    broken.write_text("m,n\n1,2\n")
    for second, says in (
        (other, "share no problem"),
        (broken, "broken.csv:1: columns missing"),
        (tmp_path / "none.csv", "none.csv"),
    ):
        assert main(["compare", str(a), str(second)]) == 2
        assert says in capsys.readouterr().err
    assert main(["compare", "--tolerance", "5", str(a), str(a)]) == 2
    assert "--tolerance" in capsys.readouterr().err
