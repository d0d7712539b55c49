"""Means, wins and losses: what the vendor served is never our win, and means are the ones named."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_cases import PROBLEMS, line, write

from ktlib.problem import Problem
from ktlib_generator.report.rows import Section, read_result, sections
from ktlib_generator.report.speedups import class_of, geomean, losses, noise_floor, pairs, summarise

SMALL = Problem(64, 64, 64)
OTHER = Problem(64, 64, 128)
LARGE = Problem(8192, 8192, 8192)


def section(path: Path, rows: list[str]) -> Section:
    (found,) = sections(read_result(write(path, rows)))
    return found


@pytest.mark.parametrize("tier", ["vendor", "vendor_algorithm"])
def test_a_faster_call_that_the_vendor_served_is_no_win(tmp_path: Path, tier: str) -> None:
    rows = [
        line(SMALL, "ktlib", 1.0, tier=tier),
        line(SMALL, "torch", 2.0),
        line(OTHER, "ktlib", 1.0),
        line(OTHER, "torch", 1.5),
    ]
    *_, total = summarise(pairs(section(tmp_path / "r.csv", rows), "ktlib", "torch"))
    assert (total.problems, total.own, total.wins, total.win_rate) == (2, 1, 1, 0.5)
    assert total.geomean == pytest.approx(3.0**0.5)
    assert total.geomean_own == pytest.approx(1.5)


def test_means_are_geometric_and_arithmetic_and_by_class(tmp_path: Path) -> None:
    rows = []
    for problem, ratio in ((SMALL, 4.0), (OTHER, 1.0), (LARGE, 0.5)):
        rows += [line(problem, "ktlib", 10.0), line(problem, "torch", 10.0 * ratio)]
    small, large, total = summarise(pairs(section(tmp_path / "r.csv", rows), "ktlib", "torch"))
    assert (small.label, large.label, total.label) == ("< 0.5", "> 140", "all")
    assert (small.geomean, small.mean) == (pytest.approx(2.0), pytest.approx(2.5))
    assert total.geomean == pytest.approx(2.0 ** (1 / 3))
    assert total.worst.problem == LARGE
    assert (total.losses, small.losses) == (1, 0)


def test_losses_are_worst_first_and_those_the_vendor_served_too(tmp_path: Path) -> None:
    rows = []
    for problem, ratio, tier in ((SMALL, 0.97, "vendor"), (OTHER, 0.99, "exact"), (LARGE, 0.5, "exact")):
        rows += [line(problem, "ktlib", 10.0, tier=tier), line(problem, "torch", 10.0 * ratio)]
    found = losses(pairs(section(tmp_path / "r.csv", rows), "ktlib", "torch"))
    assert [pair.problem for pair in found] == [LARGE, SMALL]


def test_noise_is_how_far_the_control_strays_and_short_problems_can_be_left_out(tmp_path: Path) -> None:
    rows = []
    for problem, us, strays in ((SMALL, 1.0, 0.5), (OTHER, 20.0, 0.01), (LARGE, 900.0, -0.03)):
        rows += [line(problem, "torch", us), line(problem, "control", us * (1 + strays))]
    part = section(tmp_path / "r.csv", rows)
    floor = noise_floor(part, above_us=5.0)
    assert floor is not None
    assert (floor.problems, floor.median, floor.p95) == (2, pytest.approx(0.02), pytest.approx(0.03))
    every = noise_floor(part)
    assert every is not None
    assert every.p95 == pytest.approx(0.5)
    assert noise_floor(part, above_us=1e4) is None
    assert noise_floor(section(tmp_path / "s.csv", rows[::2])) is None


def test_class_bounds_belong_to_the_class_above() -> None:
    assert class_of(Problem(1000, 1000, 250)) == "0.5 to 8"
    assert class_of(Problem(1000, 1000, 249)) == "< 0.5"
    assert {class_of(problem) for problem in PROBLEMS} == {"< 0.5", "0.5 to 8", "8 to 140", "> 140"}


def test_geomean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing"):
        geomean([])
