"""`python -m benchmarks COMMAND`: what turns result files into something to read; see --help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import compare, report

DESCRIPTION = """\
Result files (benchmarks/results/*.csv) hold one row for each problem, method and protocol, under the
environment they were measured in. These commands read them; none needs a GPU. What measures is listed
in README under Benchmarks."""

EPILOG = """\
examples:
  python -m benchmarks report benchmarks/results/*graph*.csv --out report   tables and pictures
  python -m benchmarks compare before.csv after.csv                         exit code 1: after is slower

Each command's --help says more."""

# Each module has NAME, SUMMARY, DESCRIPTION, EPILOG, add_arguments(parser) and run(arguments) -> exit code.
COMMANDS = (report, compare)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code, or 2 where what was asked or read makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choices = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for module in COMMANDS:
        command = choices.add_parser(
            module.NAME,
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        code: int = arguments.run(arguments)
    except (ValueError, OSError) as error:
        print(f"python -m benchmarks {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    raise SystemExit(main())
