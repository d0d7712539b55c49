"""Result files: what is malformed is refused with file and line, what a run wrote is read as it was."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
from report_cases import ENVIRONMENT, PROBLEMS, line, run, write

from ktlib.problem import Problem
from ktlib_generator.report.rows import (
    COLUMNS,
    ResultError,
    best_of_layouts,
    read_result,
    sections,
)
from ktlib_generator.values import Environment, Status

FIRST = len(ENVIRONMENT) + 2
GOOD = line(PROBLEMS[0], "torch", 3.0)


def test_columns_are_those_of_the_writer(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(checkout)
    assert importlib.import_module("benchmarks.kernel_times").COLUMNS == COLUMNS


def test_what_the_writer_wrote_is_read_back(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(checkout)
    results = importlib.import_module("benchmarks.results")
    environment = Environment("NVIDIA H200", "sm90a", 132, "abc", True, (("driver", "580"),))
    kernel = "sm90_tma/dtype=bf16,layout=nt,tile_m=64/sm90a"
    cells = (
        "s",
        2,
        8,
        9,
        10,
        "nt",
        "bf16",
        "fp32",
        "ktlib",
        "graph-hot",
        "2.5",
        "0.01",
        11,
        kernel,
        "exact",
        "ok",
    )
    results.write_rows(tmp_path / "r.csv", environment, COLUMNS, [cells], seconds="4: five")
    file = read_result(tmp_path / "r.csv")
    assert file.environment["commit"] == "abc+changes"
    assert file.environment["seconds"] == "4: five"
    (row,) = file.rows
    assert row.problem == Problem(8, 9, 10, "nt", "bf16", batch=2)
    assert (row.latency_us, row.spread, row.samples, row.kernel) == (2.5, 0.01, 11, kernel)
    assert row.is_ours


@pytest.mark.parametrize(
    ("rows", "at", "says"),
    [
        ([GOOD.replace("3.00000", "nan")], FIRST, "median_us must be a number above 0, got 'nan'"),
        ([GOOD.replace("3.00000", "inf")], FIRST, "median_us must be a number above 0, got 'inf'"),
        ([GOOD.replace("3.00000", "")], FIRST, "median_us must be a number above 0, got ''"),
        ([GOOD.replace("3.00000", "-1")], FIRST, "median_us"),
        ([GOOD.replace("0.004", "nan")], FIRST, "spread must be a number from 0, got 'nan'"),
        ([GOOD.replace(",41,", ",0,")], FIRST, "samples must be at least 1"),
        ([GOOD.replace(",64,64,", ",64,x,")], FIRST, "n must be a whole number, got 'x'"),
        ([GOOD.replace(",64,64,", ",64,0,")], FIRST, "is empty"),
        ([GOOD.replace(",nn,", ",nx,")], FIRST, "layout 'nx' is unknown"),
        ([GOOD.replace(",vendor,", ",best,")], FIRST, "tier 'best' is unknown"),
        ([GOOD.replace(",ok", ",good")], FIRST, "status 'good' is unknown"),
        ([GOOD.replace(",ok", ",timeout")], FIRST, "status timeout with a time"),
        ([GOOD, GOOD + ",9"], FIRST + 1, "17 cells under 16 columns"),
        ([GOOD, line(PROBLEMS[1], "torch", 1.0), GOOD], FIRST + 2, f"already on line {FIRST}"),
        ([], FIRST - 1, "no rows"),
    ],
)
def test_a_malformed_row_is_refused_at_its_line(tmp_path: Path, rows: list[str], at: int, says: str) -> None:
    path = write(tmp_path / "r.csv", rows)
    with pytest.raises(ResultError) as refused:
        read_result(path)
    assert str(refused.value).startswith(f"{path}:{at}: ")
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("text", "at", "says"),
    [
        ("", 1, "empty"),
        ("# device: x\n\n", 2, "empty"),
        ("# no colon here\n", 1, "expected '# key: value'"),
        ("suite,m,n,k\n", 1, "missing 'batch', 'layout'"),
        (",".join(COLUMNS) + ",colour\n", 1, "unknown 'colour'"),
        (",".join(COLUMNS) + ",m\n", 1, "repeated 'm'"),
    ],
)
def test_a_file_without_its_columns_is_refused(tmp_path: Path, text: str, at: int, says: str) -> None:
    path = tmp_path / "r.csv"
    path.write_text(text)
    with pytest.raises(ResultError) as refused:
        read_result(path)
    assert str(refused.value).startswith(f"{path}:{at}: ")
    assert says in str(refused.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ResultError, match=r"r\.csv:1: not a text file"):
        read_result(tmp_path / "r.csv")


def test_a_failed_row_has_no_time_and_counts_nowhere(tmp_path: Path) -> None:
    rows = [GOOD, line(PROBLEMS[0], "ktlib", "", status="wrong_result")]
    (section,) = sections(read_result(write(tmp_path / "r.csv", rows)))
    assert section.rows[1].status is Status.WRONG_RESULT
    assert section.methods == ("torch",)
    assert section.subjects == ()


def test_suites_protocols_and_accumulation_are_kept_apart(tmp_path: Path) -> None:
    p = PROBLEMS[0]
    rows = [
        line(p, "torch", 3.0),
        line(p, "torch", 4.0, protocol="server"),
        line(p, "torch", 5.0, suite="other"),
        line(dataclasses.replace(p, accumulate="fp16"), "torch", 6.0),
    ]
    found = sections(read_result(write(tmp_path / "r.csv", rows)))
    assert [part.title for part in found] == [
        "small, graph-hot",
        "small, server",
        "other, graph-hot",
        "small, graph-hot, accumulate fp16",
    ]
    assert [part.rows[0].latency_us for part in found] == [3.0, 4.0, 5.0, 6.0]


def test_best_of_layouts_is_the_faster_twin_and_only_where_both_were_timed(tmp_path: Path) -> None:
    both, alone = Problem(64, 64, 64), Problem(128, 64, 64)
    rows = [
        line(both, "cublas", 3.0),
        line(dataclasses.replace(both, layout="nt"), "cublas", 2.0),
        line(alone, "cublas", 5.0),
    ]
    (section,) = sections(read_result(write(tmp_path / "r.csv", rows)))
    found = best_of_layouts(section, ("cublas", "torch")).by_problem
    assert found[both]["cublas_best"].latency_us == 2.0
    assert found[dataclasses.replace(both, layout="nt")]["cublas_best"].latency_us == 2.0
    assert "cublas_best" not in found[alone]


def test_the_control_is_no_baseline_and_repeats_the_one_the_header_names(tmp_path: Path) -> None:
    (section,) = sections(read_result(run(tmp_path / "a.csv")))
    assert section.baselines == ("torch", "cublaslt_heuristic")
    assert section.controlled == "torch"
    named = {**ENVIRONMENT, "control": "cublaslt_heuristic"}
    (section,) = sections(read_result(run(tmp_path / "b.csv", environment=named)))
    assert section.controlled == "cublaslt_heuristic"
