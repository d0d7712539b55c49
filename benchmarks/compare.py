"""`python -m benchmarks compare`: what became slower between two result files, beyond the noise."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from ktlib_generator.report import Comparison, compare, read_result
from ktlib_generator.report import comparison as rules

NAME = "compare"
SUMMARY = "what is slower in B than in A, beyond the noise"
DESCRIPTION = f"""\
Pairs two result files by problem, method and protocol, and gives for each method and FLOP class the
geometric mean of B's time over A's (above 1: B is slower).

  ratio     as measured
  relative  after the other baselines' movement on the same problems is taken out: what the method did,
            not what the machine did. This one is judged, unless --absolute. Where the baselines moved
            apart, those that moved least stand for the machine
  noise     what the mean may move by chance: {rules.SIGMAS:g} standard errors, from what was seen between
            the problems, from the spread columns and from the `control` rows, and at least --tolerance

B is worse, and the exit code 1, when
  - a method's class is slower by more than its noise, or
  - {rules.PROBLEM_SHARE:.0%} of a method's problems, and at least {rules.PROBLEM_COUNT}, are slower
    by more than {rules.PROBLEM_FLOOR:.0%} and by more than {rules.PROBLEM_SIGMAS:g} times their own noise, or
  - a problem that had a time in A failed in B.

Warnings do not change the exit code: clocks more than {rules.CLOCK_TOLERANCE:.0%} apart, another
power limit or device, throttling, baselines that all moved. With one of them, times
as measured do not compare; relative ones do.

Exit code 2: a file could not be read, or the two share nothing."""
EPILOG = """\
examples:
  python -m benchmarks compare before.csv after.csv
  python -m benchmarks compare before.csv after.csv --json | jq .regressions"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("a", metavar="A.csv", type=Path, help="result file from before")
    parser.add_argument("b", metavar="B.csv", type=Path, help="result file from after")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--absolute", action="store_true", help="judge times as measured, not relative ones")
    parser.add_argument("--tolerance", metavar="SHARE", type=float, default=rules.TOLERANCE,
                        help="smallest change worth a word (default: %(default)s)")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison; 1 when B is worse."""
    if not 0 <= arguments.tolerance < 1:
        raise ValueError(f"--tolerance must be a share from 0 to 1, got {arguments.tolerance}")
    found = compare(
        read_result(arguments.a),
        read_result(arguments.b),
        tolerance=arguments.tolerance,
        absolute=arguments.absolute,
    )
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else "\n".join(lines(found)))
    return 1 if found.regressions else 0


def lines(found: Comparison, listed: int = 20) -> Iterator[str]:
    """Say a comparison in text."""
    yield f"A  {found.a}"
    yield f"B  {found.b}"
    only = (
        f"; {found.only_a} rows only in A, {found.only_b} only in B" if found.only_a or found.only_b else ""
    )
    yield f"{found.pairs} pairs{only}"
    for text in found.warnings:
        yield f"warning  {text}"
    for text in found.notes:
        yield f"note     {text}"
    place = ("", "")
    for change in found.changes:
        if (change.suite, change.protocol) != place:
            place = (change.suite, change.protocol)
            yield ""
            yield f"{change.suite}, {change.protocol}: B over A, above 1 is slower"
            yield f"{'method':<24} {'GFLOP':<9} {'n':>5} {'ratio':>7} {'relative':>9} {'noise':>7}"
        mark = "" if change.verdict == "same" else f"  {change.verdict}"
        yield (
            f"{change.method:<24} {change.flop_class:<9} {change.problems:>5} {change.ratio:>7.3f} "
            f"{change.relative:>9.3f} {change.noise:>7.2%}{mark}"
        )
    if found.slowed:
        yield ""
        yield "slower problems, worst first (single ones may be stalls; measure them again):"
        for one in found.slowed[:listed]:
            yield (
                f"  {one.problem} by {one.method}: {one.a_us:.2f} -> {one.b_us:.2f} us, relative "
                f"{one.relative:.3f}, noise {one.noise:.1%}"
            )
        if len(found.slowed) > listed:
            yield f"  and {len(found.slowed) - listed} more (--json lists all)"
    yield ""
    if found.regressions:
        yield f"B is worse than A: {len(found.regressions)} regression{'s' * (len(found.regressions) != 1)}"
        yield from (f"  {text}" for text in found.regressions)
    else:
        yield "no regression beyond the noise"
