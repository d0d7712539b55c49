"""How every picture looks: fonts, colours that colour-blind readers and printers keep apart, ratio axes.

Must not know what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: distinct under every common colour blindness. Markers and dashes differ too.
BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#E69F00",
    "#CC79A7",
    "#56B4E9",
    "#000000",
)
GREY, LIGHT = "#6E6E6E", "#D9D9D9"
SERIES = (VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
# Diverging, orange below 1, purple above: safe for colour-blind readers; in grey the numbers carry the sign.
DIVERGING = "PuOr"

DOTS_PER_INCH = 150
_SETTINGS = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#404040",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "figure.facecolor": "white",
    "savefig.dpi": DOTS_PER_INCH,
}
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 20.0, 50.0, 100.0)

_DECADE_STEPS: tuple[tuple[float, tuple[float, ...]], ...] = (
    (6.0, (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)),
    (30.0, (1.0, 2.0, 3.0, 5.0)),
    (300.0, (1.0, 3.0)),
    (math.inf, (1.0,)),
)


@contextmanager
def styled() -> Iterator[None]:
    """Draw in the house style, leaving the process's settings as they were."""
    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        yield


def colour(position: int) -> str:
    """Return a series' colour by its position; it repeats only after six."""
    return SERIES[position % len(SERIES)]


def dash(position: int) -> str | tuple[int, tuple[int, ...]]:
    """Return a series' line style by its position, so that print without colour tells them apart."""
    return DASHES[position % len(DASHES)]


def ratio_axis(axes: Axes, values: Sequence[float], axis: str = "y") -> None:
    """Make an axis logarithmic around 1, with plain numbers at its ticks and room for every value."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = ratio_limits(values)
    set_scale, set_limits = (
        (axes.set_yscale, axes.set_ylim) if axis == "y" else (axes.set_xscale, axes.set_xlim)
    )
    set_scale("log")
    set_limits(low, high)
    chosen = axes.yaxis if axis == "y" else axes.xaxis
    chosen.set_major_locator(FixedLocator(ratio_ticks(low, high)))
    chosen.set_minor_locator(NullLocator())
    chosen.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}x"))


def ratio_limits(values: Sequence[float]) -> tuple[float, float]:
    """Return axis limits that hold all values and 1, with a margin, and at least 10% to each side."""
    low, high = min(*values, 0.91), max(*values, 1.1)
    margin = (high / low) ** 0.05
    return low / margin, high * margin


def ratio_ticks(low: float, high: float) -> list[float]:
    """Return between three and nine tick values inside the limits, 1 among them."""
    inside = [tick for tick in _TICKS if low <= tick <= high]
    if len(inside) >= 4:
        while len(inside) > 9:
            inside = [tick for tick in inside if tick == 1.0 or inside.index(tick) % 2 == 0]
        return inside
    for step in (0.05, 0.1, 0.2):
        first = math.ceil(low / step)
        fine = [round(step * number, 2) for number in range(first, int(high / step) + 1)]
        if len(fine) <= 9:
            return fine
    return inside


def power_axis(axes: Axes, low: float, high: float, axis: str = "x") -> None:
    """Make an axis logarithmic with plain decimals at powers of ten, and room for both ends."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    margin = (high / low) ** 0.04 if high > low else 1.5
    set_scale, set_limits = (
        (axes.set_xscale, axes.set_xlim) if axis == "x" else (axes.set_yscale, axes.set_ylim)
    )
    set_scale("log")
    set_limits(low / margin, high * margin)
    chosen = axes.xaxis if axis == "x" else axes.yaxis
    # Powers of ten alone leave a short axis bare.
    steps = next(steps for most, steps in _DECADE_STEPS if high / low <= most)
    chosen.set_major_locator(LogLocator(subs=steps, numticks=20))
    chosen.set_minor_locator(NullLocator())
    chosen.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
