"""Pictures: every panel has its points, every point is drawn, and nothing written on one covers another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from report_cases import PROBLEMS, line, run, us_of, write

from ktlib.problem import Problem
from ktlib_generator.report import figures, style
from ktlib_generator.report.rows import Section, read_result, sections
from ktlib_generator.report.speedups import pairs

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure


@pytest.fixture(autouse=True)
def in_style() -> Iterator[None]:
    with style.styled():
        yield


@pytest.fixture
def section(tmp_path: Path) -> Section:
    """A run in which the vendor serves the first six problems."""
    rows = [
        line(p, method, us_of(p, method), tier="vendor" if method == "ktlib" and at < 6 else "")
        for at, p in enumerate(PROBLEMS)
        for method in ("ktlib", "torch", "cublas")
    ]
    (found,) = sections(read_result(write(tmp_path / "r.csv", rows)))
    return found


def points(axes: Axes) -> dict[str, int]:
    return {
        str(drawn.get_label()): len(drawn.get_offsets())
        for drawn in axes.collections
        if isinstance(drawn, PathCollection)
    }


def check(figure: Figure) -> None:
    """No empty panel, both axes named, something inside each panel, and no tick label over another."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    pixels = np.asarray(figure.canvas.buffer_rgba())[::-1, :, :3].astype(int)  # type: ignore[attr-defined]
    for axes in figure.axes:
        assert axes.has_data()
        assert axes.get_ylabel()
        # Inside of the frame, so that frame and ticks do not count.
        x0, y0, x1, y1 = (int(v) for v in axes.get_window_extent(renderer).extents)
        inside = pixels[y0 + 3 : y1 - 3, x0 + 3 : x1 - 3]
        assert (inside.max(axis=2) - inside.min(axis=2) > 40).any(), "nothing in colour inside the panel"
        for axis, side in ((axes.xaxis, 0), (axes.yaxis, 1)):
            low, high = sorted(axis.get_view_interval())
            shown = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            if shown and not shown[0].get_rotation():
                spans = sorted(tuple(label.get_window_extent(renderer).extents[side::2]) for label in shown)
                assert all(first[1] <= second[0] + 1 for first, second in itertools.pairwise(spans))


def test_speedup_has_a_panel_for_each_baseline_and_every_problem_once(section: Section) -> None:
    found = {name: pairs(section, "ktlib", name) for name in section.baselines}
    figure = figures.speedup_by_flops(found, "ktlib")
    assert figure is not None
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["over torch", "over cublas"]
    for axes in figure.axes:
        assert points(axes) == {"ktlib, own kernel": len(PROBLEMS) - 6, "ktlib, served by the vendor": 6}
        means = [drawn for drawn in axes.lines if drawn.get_linewidth() == 2.0]
        assert [mean.get_ydata()[0] for mean in means] == pytest.approx([1.2] * 4)
    check(figure)


def test_a_baseline_without_times_gets_no_panel(section: Section) -> None:
    figure = figures.speedup_by_flops({"torch": pairs(section, "ktlib", "torch"), "triton": []}, "ktlib")
    assert figure is not None
    assert len(figure.axes) == 1
    assert figures.speedup_by_flops({"triton": []}, "ktlib") is None
    assert figures.sorted_speedups({}, "ktlib") is None


def grid(path: Path, skip: tuple[int, int, int] | None, extents: tuple[int, ...] = (64, 128, 256)) -> Section:
    rows = []
    for m in extents:
        for n in extents:
            for k in (64, 512):
                if (m, n, k) != skip:
                    p = Problem(m, n, k)
                    rows += [line(p, "ktlib", 2.0), line(p, "torch", 2.0 * m / 128)]
    (found,) = sections(read_result(write(path, rows)))
    return found


def test_heat_map_puts_each_ratio_in_its_cell_and_a_dash_where_nothing_was_timed(tmp_path: Path) -> None:
    part = grid(tmp_path / "r.csv", skip=(128, 256, 512))
    figure = figures.heat_maps(pairs(part, "ktlib", "torch"), "torch", "ktlib")
    assert figure is not None
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes if axes.images}
    assert list(panels) == ["K = 64", "K = 512"]
    texts = [text.get_text() for text in panels["K = 512"].texts]
    assert texts == ["0.50", "0.50", "0.50", "1.00", "1.00", "\u2013", "2.00", "2.00", "2.00"]
    assert panels["K = 64"].images[0].get_array().tolist() == [[-1.0] * 3, [0.0] * 3, [1.0] * 3]
    assert [tick.get_text() for tick in panels["K = 64"].get_yticklabels()] == ["64", "128", "256"]
    check(figure)


def test_no_heat_map_of_scattered_or_few_problems(tmp_path: Path, section: Section) -> None:
    assert figures.heat_maps(pairs(section, "ktlib", "torch"), "torch", "ktlib") is None
    few = grid(tmp_path / "few.csv", skip=None, extents=(64, 128))
    assert figures.heat_maps(pairs(few, "ktlib", "torch"), "torch", "ktlib") is None


def test_roofline_bends_where_memory_meets_arithmetic_and_has_every_point(section: Section) -> None:
    figure = figures.roofline(section, "ktlib", "torch", bandwidth_tb_s=4.0, peak_tflop_s=800.0)
    assert figure is not None
    (axes,) = figure.axes
    roof = axes.lines[0]
    assert (roof.get_xdata()[1], roof.get_ydata()[1]) == (200.0, 800.0)
    total = len(PROBLEMS)
    assert points(axes) == {
        "torch": total,
        "ktlib, served by the vendor": 6,
        "ktlib, own kernel": total - 6,
    }
    rate = max(drawn.get_offsets()[:, 1].max() for drawn in axes.collections)
    assert rate == pytest.approx(max(p.flops / us_of(p, "ktlib") / 1e6 for p in PROBLEMS), rel=1e-4)
    low, high = axes.get_ylim()
    assert low < rate < high
    check(figure)


def test_sorted_speedups_rise_and_say_how_many_are_lost(tmp_path: Path) -> None:
    part = grid(tmp_path / "r.csv", skip=None)
    figure = figures.sorted_speedups({"torch": pairs(part, "ktlib", "torch")}, "ktlib")
    assert figure is not None
    curve = figure.axes[0].lines[-1]
    assert list(curve.get_ydata()) == pytest.approx(sorted([0.5] * 6 + [1.0] * 6 + [2.0] * 6))
    assert curve.get_label() == "over torch: 6 of 18 lost"
    check(figure)


def test_latencies_have_a_panel_for_each_class_that_has_problems_and_a_curve_for_each_method(
    tmp_path: Path,
) -> None:
    some = [p for p in PROBLEMS if p.flops < 5e8 or p.flops > 140e9]
    (part,) = sections(read_result(run(tmp_path / "r.csv", problems=some, protocol="server")))
    figure = figures.latency_distributions(part)
    assert figure is not None
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "< 0.5 GFLOP, 10 problems",
        "> 140 GFLOP, 10 problems",
    ]
    for axes in figure.axes:
        assert [drawn.get_label() for drawn in axes.lines] == list(part.methods)
        assert all(drawn.get_ydata()[-1] == 100.0 for drawn in axes.lines)
    check(figure)


def test_tail_latencies_are_drawn_beside_the_medians_when_the_file_has_them(tmp_path: Path) -> None:
    rows = [f"{line(p, 'torch', us_of(p, 'torch'))},{2 * us_of(p, 'torch')}" for p in PROBLEMS[:10]]
    path = write(tmp_path / "r.csv", rows, extra=",p99_us")
    (part,) = sections(read_result(path))
    figure = figures.latency_distributions(part)
    assert figure is not None
    median, tail = figure.axes[0].lines
    assert list(tail.get_xdata()) == pytest.approx([2 * us for us in median.get_xdata()])
    assert "99th" in figure.axes[0].get_xlabel()
    check(figure)


@pytest.mark.parametrize(
    ("low", "high"), [(1.0, 1.0), (0.97, 1.04), (0.8, 1.3), (0.5, 2.2), (0.15, 3.0), (0.02, 40.0)]
)
def test_ratio_axis_has_readable_ticks_for_narrow_and_wide_ranges(low: float, high: float) -> None:
    ends = style.ratio_limits([low, high])
    ticks = style.ratio_ticks(*ends)
    assert 1.0 in ticks
    assert 3 <= len(ticks) <= 9
    assert all(ends[0] <= tick <= ends[1] for tick in ticks)


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (2.0, 5.5), (2.1, 40.0), (1e-3, 9e3)])
def test_power_axis_has_readable_ticks_for_narrow_and_wide_ranges(low: float, high: float) -> None:
    figure, (axes,) = figures.figure_grid(1, 1, 5.0, 3.5)
    style.power_axis(axes, low, high)
    axes.set_ylabel("y")
    axes.scatter([low, math.sqrt(low * high), high], [1, 2, 3], color=style.BLUE)
    ends = axes.get_xlim()
    inside = [tick for tick in axes.get_xticks() if ends[0] <= tick <= ends[1]]
    assert 1 <= len(inside) <= 9
    check(figure)


def test_style_leaves_the_process_as_it_was() -> None:
    import matplotlib

    matplotlib.rcParams["font.size"] = 11.0
    with style.styled():
        assert matplotlib.rcParams["font.size"] == 9.0
    assert matplotlib.rcParams["font.size"] == 11.0
