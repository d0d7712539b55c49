"""Draws the pictures of a report; each function returns a figure, or None where there is not enough data.

Must not read or write files; a panel is made only for what has points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ktlib.problem import Problem
from ktlib_generator.report import style
from ktlib_generator.report.rows import BEST_SUFFIX, VENDOR_TIERS, Row, Section
from ktlib_generator.report.speedups import CLASSES, LOSS, Pair, class_of, geomean, us

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A heat map says something only with this many extents on both axes and this share of its cells measured.
MAP_EXTENTS = 3
MAP_FILLED = 0.75
# A cell this wide in inches holds a number.
CELL_INCHES = 0.36


def figure_grid(panels: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Make a figure of exactly `panels` axes, `width` x `height` inches each, rows filled from the top."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, panels)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(panels)]


def _panel_size(panels: int) -> tuple[float, float]:
    """Width and height in inches: one panel is wide, three abreast are narrow."""
    return (7.5, 4.0) if panels == 1 else (4.2, 3.4) if panels in (3, 5, 6) else (5.0, 3.5)


def speedup_by_flops(found: Mapping[str, Sequence[Pair]], subject: str) -> Figure | None:
    """Draw speed-up against FLOPs, a panel for each baseline; calls the vendor served are hollow."""
    given = {name: pairs for name, pairs in found.items() if pairs}
    if not given:
        return None
    ratios = [pair.speedup for pairs in given.values() for pair in pairs]
    gflops = [pair.problem.flops / 1e9 for pairs in given.values() for pair in pairs]
    figure, panels = figure_grid(len(given), 3 if len(given) in (3, 5, 6) else 2, *_panel_size(len(given)))
    for axes, (name, pairs) in zip(panels, given.items(), strict=True):
        style.ratio_axis(axes, ratios)
        style.power_axis(axes, min(gflops), max(gflops))
        _class_bounds(axes, min(gflops), max(gflops))
        axes.axhline(1.0, color=style.BLACK, linewidth=1.0)
        size, alpha = _marks(len(pairs))
        served = (
            (True, f"{subject}, own kernel", {"marker": "o", "color": style.BLUE, "alpha": alpha}),
            (False, f"{subject}, served by the vendor",
             {"marker": "s", "facecolors": "none", "edgecolors": style.GREY, "alpha": alpha}),
        )  # fmt: skip
        for own, label, look in served:
            chosen = [pair for pair in pairs if pair.ours.is_ours is own]
            if chosen:
                x = [pair.problem.flops / 1e9 for pair in chosen]
                axes.scatter(
                    x, [pair.speedup for pair in chosen], s=size, linewidths=0.9, label=label, **look
                )
        _class_means(axes, pairs)
        axes.set_title(f"over {name}")
        axes.set_xlabel("GFLOP of the problem")
        axes.set_ylabel(f"speed-up of {subject}")
    _legend_below(figure, panels)
    return figure


def _legend_below(figure: Figure, panels: Sequence[Axes], columns: int = 4) -> None:
    """One legend for all panels, outside them, so that it never covers a point."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=min(columns, len(handles))
    )


def _marks(points: int) -> tuple[float, float]:
    """Size and opacity of markers: many points have to let each other show."""
    return (16.0, 0.8) if points <= 400 else (8.0, 0.45)


def _class_bounds(axes: Axes, low: float, high: float) -> None:
    for bound, _ in CLASSES:
        if low < bound < high:
            axes.axvline(bound, color=style.GREY, linewidth=0.8, linestyle=":")


def _class_means(axes: Axes, pairs: Sequence[Pair]) -> None:
    label: str | None = "geometric mean of the class"
    for _, name in CLASSES:
        group = [pair for pair in pairs if class_of(pair.problem) == name]
        if not group:
            continue
        mean = geomean(pair.speedup for pair in group)
        ends = [pair.problem.flops / 1e9 for pair in group]
        low, high = min(ends) / 1.15, max(ends) * 1.15
        axes.plot([low, high], [mean, mean], color=style.VERMILLION, linewidth=2.0, alpha=0.85, label=label)
        label = None


def heat_maps(pairs: Sequence[Pair], baseline: str, subject: str) -> Figure | None:
    """Draw the speed-up over M and N, a panel for each K with enough of both measured.

    A cell is the geometric mean over layouts and dtypes; cells without a time show a dash.
    """
    import matplotlib
    import numpy as np

    cells: dict[int, dict[tuple[int, int], list[float]]] = {}
    for pair in pairs:
        place = (pair.problem.m, pair.problem.n)
        cells.setdefault(pair.problem.k, {}).setdefault(place, []).append(pair.speedup)
    maps = {k: cells[k] for k in sorted(cells) if _is_map(cells[k])}
    if not maps:
        return None
    most = max(len({place[axis] for place in found}) for found in maps.values() for axis in (0, 1))
    size = max(2.9, CELL_INCHES * most + 0.7)
    figure, panels = figure_grid(len(maps), 2, size + 0.15, size)
    ratios = [geomean(values) for found in maps.values() for values in found.values()]
    limit = max(abs(math.log2(ratio)) for ratio in ratios)
    limit = min(max(limit, math.log2(1.1)), 2.0)
    image: Any = None
    for axes, (k, found) in zip(panels, maps.items(), strict=True):
        rows, columns = (sorted({place[axis] for place in found}) for axis in (0, 1))
        grid = np.full((len(rows), len(columns)), np.nan)
        for (m, n), values in found.items():
            grid[rows.index(m), columns.index(n)] = math.log2(geomean(values))
        axes.grid(visible=False)
        axes.set_facecolor("#F2F2F2")
        image = axes.imshow(
            np.ma.masked_invalid(grid), cmap=matplotlib.colormaps[style.DIVERGING], vmin=-limit, vmax=limit
        )
        for (row, column), value in np.ndenumerate(grid):
            text = "\u2013" if np.isnan(value) else f"{2**value:.2f}"
            ink = "white" if abs(value) > 0.55 * limit else style.BLACK
            # Inside its axes already: laying out a thousand numbers would take most of the time.
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=ink, in_layout=False)
        axes.set_xticks(
            range(len(columns)), [str(n) for n in columns], rotation=45, ha="right", rotation_mode="anchor"
        )
        axes.set_yticks(range(len(rows)), [str(m) for m in rows])
        axes.set_xlabel("N")
        axes.set_ylabel("M")
        axes.set_title(f"K = {k}")
    ticks = [tick for tick in (0.25, 0.33, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
             if abs(math.log2(tick)) <= limit + 1e-9]  # fmt: skip
    ticks = _apart(ticks, limit)
    bar = figure.colorbar(
        image,
        ax=panels,
        shrink=0.6 if len(maps) > 2 else 0.95,
        aspect=30,
        ticks=[math.log2(t) for t in ticks],
    )
    bar.ax.set_yticklabels([f"{tick:g}x" for tick in ticks])
    bar.set_label(f"speed-up of {subject} over {baseline}")
    return figure


def _is_map(found: Mapping[tuple[int, int], object]) -> bool:
    rows, columns = ({place[axis] for place in found} for axis in (0, 1))
    return min(len(rows), len(columns)) >= MAP_EXTENTS and len(found) >= MAP_FILLED * len(rows) * len(columns)


def _apart(ticks: Sequence[float], limit: float) -> list[float]:
    """Keep ticks at least a twelfth of the bar apart, 1 always."""
    kept = [1.0]
    for tick in sorted(ticks, key=lambda value: abs(math.log2(value))):
        if all(abs(math.log2(tick / other)) >= limit / 6 for other in kept):
            kept.append(tick)
    return sorted(kept)


def roofline(
    section: Section, subject: str, baseline: str | None, *, bandwidth_tb_s: float, peak_tflop_s: float
) -> Figure | None:
    """Draw achieved TFLOP/s against FLOPs per byte moved, under the roof of memory and arithmetic."""
    times = section.by_problem.items()
    own = [(p, found[subject]) for p, found in times if subject in found]
    other = [(p, found[baseline]) for p, found in times if baseline is not None and baseline in found]
    if not own:
        return None
    figure, (axes,) = figure_grid(1, 1, 7.5, 4.6)
    intensity = [p.flops / p.bytes_moved for p, _ in own + other]
    speed = [p.flops / us(row) / 1e6 for p, row in own + other]
    ridge = peak_tflop_s / bandwidth_tb_s
    low, high = min(*intensity, ridge / 2), max(*intensity, ridge * 2)
    style.power_axis(axes, low, high)
    style.power_axis(axes, min(speed), max(*speed, peak_tflop_s), "y")
    roof = [low / 1.2, ridge, high * 1.2]
    axes.plot(roof, [min(x * bandwidth_tb_s, peak_tflop_s) for x in roof], color=style.BLACK, linewidth=1.4,
              label=f"roof: {bandwidth_tb_s:g} TB/s, {peak_tflop_s:g} TFLOP/s")  # fmt: skip
    mine = [item for item in own if item[1].is_ours]
    vendor = [item for item in own if not item[1].is_ours]
    if vendor:
        look = {"marker": "s", "facecolors": "none", "edgecolors": style.GREY}
        _rates(axes, vendor, f"{subject}, served by the vendor", look)
    if mine:
        _rates(axes, mine, f"{subject}, own kernel", {"marker": "o", "color": style.BLUE})
    if other:
        _rates(axes, other, f"{baseline}", {"marker": "x", "color": style.ORANGE, "zorder": 3})
    axes.set_xlabel("FLOPs per byte (A and B read once, C written once)")
    axes.set_ylabel("achieved TFLOP/s")
    _legend_below(figure, [axes])
    return figure


def _rates(axes: Axes, items: Sequence[tuple[Problem, Row]], label: str, look: Mapping[str, Any]) -> None:
    x = [p.flops / p.bytes_moved for p, _ in items]
    y = [p.flops / us(row) / 1e6 for p, row in items]
    size, alpha = _marks(len(items))
    axes.scatter(x, y, s=size, linewidths=1.0, alpha=alpha, label=label, **look)


def sorted_speedups(found: Mapping[str, Sequence[Pair]], subject: str) -> Figure | None:
    """Draw each baseline's speed-ups from worst to best, so that losses are an area and not a footnote."""
    given = {name: pairs for name, pairs in found.items() if pairs}
    if not given:
        return None
    figure, (axes,) = figure_grid(1, 1, 7.5, 4.0)
    style.ratio_axis(axes, [pair.speedup for pairs in given.values() for pair in pairs])
    axes.axhspan(axes.get_ylim()[0], LOSS, color=style.VERMILLION, alpha=0.08, linewidth=0)
    axes.axhline(1.0, color=style.BLACK, linewidth=1.0)
    for position, (name, pairs) in enumerate(given.items()):
        ordered = sorted(pair.speedup for pair in pairs)
        lost = sum(ratio < LOSS for ratio in ordered)
        share = [100.0 * (number + 0.5) / len(ordered) for number in range(len(ordered))]
        label = f"over {name}: {lost} of {len(ordered)} lost"
        mark = "o" if len(ordered) < 40 else None
        axes.plot(share, ordered, color=style.colour(position), linestyle=style.dash(position), linewidth=1.8,
                  marker=mark, markersize=3.5, label=label)  # fmt: skip
    axes.set_xlim(0, 100)
    axes.set_xlabel(f"share of problems, worst first (%); shaded: lost, below {LOSS}x")
    axes.set_ylabel(f"speed-up of {subject}")
    _legend_below(figure, [axes], columns=2)
    return figure


def latency_distributions(section: Section) -> Figure | None:
    """Draw how latencies are distributed over the problems of each FLOP class, a curve for each method.

    Solid curves are medians; where the file has 99th percentiles they follow as thin curves.
    """
    groups: dict[str, dict[str, list[Row]]] = {}
    for _, label in CLASSES:
        for problem, times in section.by_problem.items():
            if class_of(problem) == label:
                for method, row in times.items():
                    if not method.endswith(BEST_SUFFIX):
                        groups.setdefault(label, {}).setdefault(method, []).append(row)
    if not groups:
        return None
    figure, panels = figure_grid(len(groups), 3 if len(groups) == 3 else 2, *_panel_size(len(groups)))
    order = [method for method in section.methods if not method.endswith(BEST_SUFFIX)]
    looks: dict[str, tuple[str, Any]] = dict.fromkeys(section.subjects[:1], (style.BLUE, "-"))
    rest = [name for name in order if name not in looks]
    looks |= {name: (style.colour(i), style.dash(i)) for i, name in enumerate(rest)}
    tails = False
    for axes, (label, methods) in zip(panels, groups.items(), strict=True):
        values = [
            time for rows in methods.values() for row in rows for time in (us(row), row.p99_us or us(row))
        ]
        style.power_axis(axes, min(values), max(values))
        for method in order:
            rows = methods.get(method, [])
            if not rows:
                continue
            tint, line = looks[method]
            _steps(axes, [us(row) for row in rows], color=tint, linestyle=line, linewidth=1.8, label=method)
            tail = [row.p99_us for row in rows if row.p99_us is not None]
            if tail:
                tails = True
                _steps(axes, tail, color=tint, linestyle=line, linewidth=0.8, alpha=0.8)
        count = max(len(rows) for rows in methods.values())
        axes.set_title(f"{label} GFLOP, {count} problem{'' if count == 1 else 's'}")
        axes.set_ylim(0, 103)
        axes.set_xlabel("latency (us)" + ("; thin: 99th percentile" if tails else ""))
        axes.set_ylabel("share of problems (%)")
    _legend_below(figure, panels)
    return figure


def _steps(axes: Axes, values: Sequence[float], **look: Any) -> None:
    ordered = sorted(values)
    share = [100.0 * (number + 1) / len(ordered) for number in range(len(ordered))]
    axes.step([ordered[0], *ordered], [0.0, *share], where="post", **look)


def served_by_vendor(pairs: Sequence[Pair]) -> int:
    """Count the calls of ours that the vendor served."""
    return sum(pair.ours.tier in VENDOR_TIERS for pair in pairs)
