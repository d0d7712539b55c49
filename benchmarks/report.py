"""`python -m benchmarks report`: Markdown and pictures from result files."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from ktlib_generator.report import Options, read_result, write_report

NAME = "report"
SUMMARY = "result files -> Markdown with pictures"
DESCRIPTION = """\
Reads result files and writes DIR/report.md with its pictures (PNG) beside it. For each suite and protocol:

  tables    speed-up over each baseline by FLOP class: geometric and arithmetic mean, win rate, losses,
            worst problem; by layout and dtype; the noise floor, from the baseline that ran twice
  pictures  speed-up against FLOPs; a map over M and N for each K that has enough of both; speed-ups
            from worst to best; a roofline; for `server` files how latencies are distributed
  lists     every problem below 0.98x, worst first, with its kernel

A call of ours that the vendor served (tier vendor or vendor_algorithm) is never counted as a win."""
EPILOG = """\
examples:
  python -m benchmarks report benchmarks/results/*graph*.csv --out report
  python -m benchmarks report run.csv --out report --bandwidth 3.35 --peak 660     the roof of another GPU

Needs matplotlib (pip install 'ktlib[bench]')."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    default = Options()
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="result file (CSV)")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, required=True, help="folder to write into; made if missing"
    )
    parser.add_argument("--bandwidth", metavar="TB/S", type=positive, default=default.bandwidth_tb_s,
                        help="memory of the roof (default: %(default)s, an H200's copy)")  # fmt: skip
    parser.add_argument("--peak", metavar="TFLOP/S", type=positive, default=default.peak_tflop_s,
                        help="arithmetic of the roof (default: %(default)s, an H200)")  # fmt: skip
    parser.add_argument("--losses", metavar="N", type=int, default=default.listed_losses,
                        help="losses listed in each table (default: %(default)s)")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Write the report and print where."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("matplotlib is not installed; install it with: pip install 'ktlib[bench]'")
    if arguments.losses < 0:
        raise ValueError(f"--losses must be at least 0, got {arguments.losses}")
    options = Options(arguments.bandwidth, arguments.peak, arguments.losses)
    paths = list(dict.fromkeys(arguments.files))
    report, *pictures = write_report([read_result(path) for path in paths], arguments.out, options)
    print(f"{report} ({len(pictures)} picture{'' if len(pictures) == 1 else 's'} beside it)")
    return 0


def positive(text: str) -> float:
    """Read a number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value
