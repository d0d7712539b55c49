"""Writes a report: Markdown with tables, and the pictures beside it.

Must not compute speed-ups; it arranges what `speedups` and `figures` give.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ktlib.problem import Problem
from ktlib_generator.report import figures, style
from ktlib_generator.report.rows import (
    BEST_SUFFIX,
    CONTROL,
    OURS,
    ResultFile,
    Section,
    best_of_layouts,
    sections,
)
from ktlib_generator.report.speedups import (
    ALL,
    LOSS,
    NOISE_FROM_US,
    Pair,
    class_of,
    geomean,
    losses,
    noise_floor,
    pairs,
    summarise,
    us,
)
from ktlib_generator.values import Status

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Called with either storage of B, cuBLAS is as fast as the faster one; published numbers use that.
BEST_OF = ("cublas", "cublaslt_heuristic", "cublaslt_at", "cublaslt_at_strong")
SHOWN_ENVIRONMENT = ("device", "driver", "cublas", "torch", "commit", "clock_sm_mhz", "power_limit_w")
# An SM clock this far below the card's highest means that power or heat held it.
LOW_CLOCK = 0.9


@dataclass(frozen=True)
class Options:
    """What a report may be told: the roof to draw, and how many losses a table lists."""

    bandwidth_tb_s: float = 4.3
    peak_tflop_s: float = 800.0
    listed_losses: int = 40


def write_report(files: Sequence[ResultFile], folder: Path, options: Options | None = None) -> list[Path]:
    """Write `report.md` and its pictures into `folder`; return the files written, the report first.

    Raises:
        ValueError: no file has a method of ours beside a baseline.
        OSError: the folder cannot be written.
    """
    options = options or Options()
    parts = [best_of_layouts(section, BEST_OF) for file in files for section in sections(file)]
    if not any(part.subjects and part.baselines for part in parts):
        named = ", ".join(str(file.path) for file in files)
        raise ValueError(
            f"{named}: no timed row of ours ({', '.join(OURS)}) beside one of a baseline; nothing to report"
        )
    folder.mkdir(parents=True, exist_ok=True)
    names = _picture_names(parts)
    written: list[Path] = []
    text = ["# Benchmark report", "", *_overview(parts), ""]
    for file in files:
        text += [f"## {file.path.name}", "", *_environment(file), ""]
        for part, name in zip(parts, names, strict=True):
            if part.file is file:
                text += _section(part, name, folder, options, written)
    text += [*_reading(), ""]
    report = folder / "report.md"
    report.write_text("\n".join(text), encoding="utf-8")
    return [report, *written]


def _picture_names(parts: Sequence[Section]) -> list[str]:
    """Name each section's pictures; a number follows where two would share a name."""
    names: list[str] = []
    for part in parts:
        words = [part.file.path.stem, part.suite, part.protocol]
        words += [part.accumulate] if part.accumulate != "fp32" else []
        name = re.sub(r"[^A-Za-z0-9.-]+", "_", "_".join(words))
        taken = sum(other == name or other.startswith(f"{name}~") for other in names)
        names.append(f"{name}~{taken + 1}" if taken else name)
    return names


def _overview(parts: Sequence[Section]) -> Iterator[str]:
    yield "Geometric means of baseline time over ours, every problem as served; above 1 ours is faster."
    yield ""
    yield "| suite, protocol | ours | baseline | problems | geomean | win rate | losses | served by vendor |"
    yield "|---|---|---|--:|--:|--:|--:|--:|"
    for part in parts:
        for subject in part.subjects:
            for baseline in part.baselines:
                found = pairs(part, subject, baseline)
                if found:
                    total = summarise(found)[-1]
                    yield (
                        f"| {part.title} | {subject} | {baseline} | {total.problems} | {total.geomean:.3f} | "
                        f"{total.win_rate:.1%} | {total.losses} | {figures.served_by_vendor(found)} |"
                    )


def _environment(file: ResultFile) -> Iterator[str]:
    about = file.environment
    shown = [f"{name} {about[name]}" for name in SHOWN_ENVIRONMENT if name in about]
    yield "; ".join(shown) + "." if shown else "The file does not say where it was measured."
    try:
        clock, highest = float(about["clock_sm_mhz"]), float(about["clock_sm_max_mhz"])
    except (KeyError, ValueError):
        return
    if clock < LOW_CLOCK * highest:
        yield ""
        yield (
            f"The SM clock stood at {clock:.0f} of {highest:.0f} MHz: power or heat held it, so times "
            "compare within this file only."
        )


def _section(part: Section, name: str, folder: Path, options: Options, written: list[Path]) -> list[str]:
    text = [f"### {part.title}", "", *_counts(part), ""]
    if not part.subjects or not part.baselines:
        return [*text, "Not set against anything: it needs a method of ours and a baseline.", ""]
    for subject in part.subjects:
        text += _summary_table(part, subject)
    text += [*_by_layout(part), *_noise(part)]
    subject, baseline = part.subjects[0], part.baselines[0]
    found = {other: pairs(part, subject, other) for other in _drawn(part)}
    pictures: list[tuple[str, str, Callable[[], Figure | None]]] = [
        ("speedup", f"Speed-up of {subject} against FLOPs, by baseline",
         lambda: figures.speedup_by_flops(found, subject)),
        ("map", f"Speed-up of {subject} over {baseline} by M and N, for each K",
         lambda: figures.heat_maps(pairs(part, subject, baseline), baseline, subject)),
        ("sorted", f"Speed-ups of {subject}, worst first", lambda: figures.sorted_speedups(found, subject)),
        ("roofline", f"{subject} and {baseline} under the roofline",
         lambda: figures.roofline(part, subject, baseline, bandwidth_tb_s=options.bandwidth_tb_s,
                                  peak_tflop_s=options.peak_tflop_s)),
    ]  # fmt: skip
    if part.protocol.startswith("server"):
        pictures.append(
            (
                "latency",
                "How latencies are distributed over the problems of each class",
                lambda: figures.latency_distributions(part),
            )
        )
    for kind, caption, draw in pictures:
        with style.styled():
            drawn = draw()
            if drawn is None:
                if kind == "map":
                    least = figures.MAP_EXTENTS
                    text += [f"No heat map: no K has {least} M and {least} N with most pairs timed.", ""]
                continue
            path = _save(drawn, folder / f"{name}_{kind}.png")
        written.append(path)
        text += [f"![{caption}]({path.name})", "", f"*{caption}.*", ""]
    for subject in part.subjects:
        for baseline in part.baselines:
            text += _loss_table(pairs(part, subject, baseline), subject, baseline, options.listed_losses)
    return text


def _drawn(part: Section) -> list[str]:
    """Baselines in pictures: the best of both layouts stands for a method that has it; tables have all."""
    return [name for name in part.baselines if name + BEST_SUFFIX not in part.baselines]


def _save(drawn: Figure, path: Path) -> Path:
    # No software name or date inside: the same file gives the same picture.
    drawn.savefig(path, metadata={"Software": None})
    return path


def _counts(part: Section) -> Iterator[str]:
    failed = [row for row in part.rows if row.status is not Status.OK]
    yield f"{len(part.by_problem)} problems; methods {', '.join(part.methods)}."
    if failed:
        yield ""
        yield f"Without a time: {len(failed)} row{'' if len(failed) == 1 else 's'}."
        for row in failed[:10]:
            yield f"- {row.problem} by {row.method}: {row.status.value} (line {row.line})"
        if len(failed) > 10:
            yield f"- and {len(failed) - 10} more"


def _summary_table(part: Section, subject: str) -> Iterator[str]:
    yield f"**Speed-up of `{subject}`**"
    yield ""
    yield (
        "| over | GFLOP | problems | geomean | mean | win rate | losses | worst | own kernels "
        "| geomean of own | vendor |"
    )
    yield "|---|---|--:|--:|--:|--:|--:|---|--:|--:|--:|"
    for baseline in part.baselines:
        for line in summarise(pairs(part, subject, baseline)):
            own = "" if line.geomean_own is None else f"{line.geomean_own:.3f}"
            label, mean = line.label, f"{line.geomean:.3f}"
            if label == ALL:
                label, mean = f"**{label}**", f"**{mean}**"
            yield (
                f"| {baseline} | {label} | {line.problems} | {mean} | {line.mean:.3f} | {line.win_rate:.1%} "
                f"| {line.losses} | {line.worst.speedup:.3f} at {line.worst.problem} | {line.own} | {own} "
                f"| {line.problems - line.own} |"
            )
    yield ""


def _by_layout(part: Section) -> Iterator[str]:
    kinds = sorted({(problem.layout, problem.dtype) for problem in part.by_problem})
    if len(kinds) < 2:
        return
    subject = part.subjects[0]
    yield f"Geomean of `{subject}` by layout and dtype:"
    yield ""
    yield "| over | " + " | ".join(f"{layout} {dtype}" for layout, dtype in kinds) + " |"
    yield "|---|" + "--:|" * len(kinds)
    for baseline in part.baselines:
        found = pairs(part, subject, baseline)
        cells = []
        for kind in kinds:
            ratios = [pair.speedup for pair in found if (pair.problem.layout, pair.problem.dtype) == kind]
            cells.append(f"{geomean(ratios):.3f}" if ratios else "")
        yield f"| {baseline} | " + " | ".join(cells) + " |"
    yield ""


def _noise(part: Section) -> Iterator[str]:
    longer, every = noise_floor(part, NOISE_FROM_US), noise_floor(part)
    if every is None:
        yield f"No noise floor: the run has no `{CONTROL}` beside the baseline that it repeats."
    else:
        yield f"Noise floor (`{CONTROL}` against `{part.controlled}`, the same call): " + "; ".join(
            f"{which} median {floor.median:.2%}, 95th percentile {floor.p95:.2%} ({floor.problems} problems)"
            for which, floor in ((f"over {NOISE_FROM_US:g} us", longer), ("all", every))
            if floor is not None
        ) + "."  # fmt: skip
    yield ""


def _loss_table(found: Sequence[Pair], subject: str, baseline: str, listed: int) -> Iterator[str]:
    if not found:
        return
    lost = losses(found)
    if not lost:
        yield f"Losses of `{subject}` to `{baseline}` (below {LOSS}x): none of {len(found)}."
        yield ""
        return
    yield f"**Losses of `{subject}` to `{baseline}`** (below {LOSS}x), {len(lost)} of {len(found)}:"
    yield ""
    yield f"| problem | GFLOP | {subject} us | {baseline} us | speed-up | spread | tier | kernel |"
    yield "|---|---|--:|--:|--:|--:|---|---|"
    for pair in lost[:listed]:
        spread = max(pair.ours.spread, pair.baseline.spread)
        yield (
            f"| {pair.problem} | {class_of(pair.problem)} | {us(pair.ours):.2f} | {us(pair.baseline):.2f} | "
            f"{pair.speedup:.3f} | {spread:.1%} | {pair.ours.tier or 'vendor'} | {_kernel(pair)} |"
        )
    if len(lost) > listed:
        yield ""
        yield f"{len(lost) - listed} more are not listed (--losses {len(lost)} lists all)."
    yield ""


def _kernel(pair: Pair) -> str:
    """The part of a variant's name that tells it from others on the same problem."""
    problem: Problem = pair.problem
    words = re.split(r"[/,]", pair.ours.kernel)
    same = {f"dtype={problem.dtype}", f"layout={problem.layout}"}
    return " ".join(word for word in words if word not in same)


def _reading() -> Iterator[str]:
    yield "## How to read this"
    yield ""
    yield (
        "- Speed-up: the baseline's median over ours, both from one run, interleaved. geomean: geometric "
        "mean. mean: arithmetic, only to set beside published figures."
    )
    yield (
        "- win rate: share of all problems where a kernel of ours ran and was faster. A call that the vendor "
        "served (tier vendor or vendor_algorithm) is never a win; the last column counts those."
    )
    yield f"- losses: problems below {LOSS}x, whoever served them. geomean of own: where our kernels ran."
    yield (
        "- `ktlib` is the call as dispatched, `ktlib_own` the best kernel of ours whether or not dispatch "
        "takes it. `NAME_best` is the faster of a problem's nn and nt times by NAME."
    )
