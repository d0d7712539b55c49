"""The command `ktlib-build`: its words, its help, and every error in one line with what to do.

Must not do the work; commands.py does.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from ktlib.problem import DTYPES, LAYOUTS
from ktlib_generator import commands
from ktlib_generator.budget import Budget
from ktlib_generator.search.registry import strategy_names

PROGRAM = "ktlib-build"
EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_ABOUT = """Fill the tuning database that ktlib's dispatcher picks kernels from.

The usual way, for a new GPU, a CPU, or shapes of your own:

  ktlib-build tune --problems 4096x4096x1024:nt:bf16 --dry-run    what would happen
  ktlib-build tune --problems 4096x4096x1024:nt:bf16              search, verify, time, save
  ktlib-build pack tuning_db/<profile>.h5                         make the file the runtime reads
  ktlib explain 4096x4096x1024:nt:bf16                            what a call would now launch

Everything a run learns is kept as it goes: Ctrl-C or a crash loses at most one trial, and --resume goes on.
"""

_TUNE = """examples:
  ktlib-build tune --problems benchmarks/suites/cpu_demo.toml
  ktlib-build tune --problems 512x512x512 1024x1024x1024:nt --dtype fp16,bf16
  ktlib-build tune --problems grid --layout nn,nt --budget 2h --profile sm90a-132
  ktlib-build tune --problems benchmarks/suites/cudal2_40.toml --budget 300s,20/problem --resume

A problem is MxNxK[:layout[:dtype]]: C[M,N] = A[M,K] B[K,N]; layout n is row-major and t a transposed view,
A then B, so a [N,K] weight passed as w.t() is nt. grid is the 1,000 problems with M, N, K each of 64 128 256
512 1024 2048 4096 8192 12288 16384 (nn, fp16 unless --layout or --dtype say otherwise).
"""

_BUILD = """example:
  ktlib-build build sm90_tma/dtype=fp16,group_m=1,layout=nt,num_stages=4,schedule=single,tile_k=64,\\
tile_m=128,tile_n=128/sm90a -o kernel.cubin
"""

_MERGE = """examples:
  ktlib-build merge tuning_runs/sm90a-132
  ktlib-build merge node1/run node2/run old.h5 -o tuning_db/sm90a-132.h5

All records are kept, failures too; doubles are dropped. Sources of several profiles are refused.
"""

_INSPECT = """examples:
  ktlib-build inspect tuning_db/sm90a-132.h5
  ktlib-build inspect tuning_db/sm90a-132.h5 --json | jq .by_status
"""

_VERIFY = """example:
  ktlib-build verify tuning_db/*.h5

Prints each damaged entry; the exit code is 1 if there is one.
"""

_EXPORT = """examples:
  ktlib-build export tuning_db/sm90a-132.h5 > records.jsonl
  ktlib-build export tuning_db/sm90a-132.h5 -o records.jsonl
"""

_IMPORT = """example:
  ktlib-build import records.jsonl -o tuning_db/sm90a-132.h5

Nothing is written unless the whole file is there and matches the checksum in its last line.
"""

_PACK = """examples:
  ktlib-build pack tuning_db/cpu-x86_64_v3.h5
  ktlib-build pack tuning_db/sm90a-132.h5 -o ktlib/databases/sm90a-132.ktpack

A kernel enters only where it beat the vendor by more than the noise of both, measured interleaved.
"""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like every other error here."""

    def error(self, message: str) -> NoReturn:
        print(f"{PROGRAM}: error: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command."""
    root = _Parser(PROGRAM, description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    root.add_argument("--debug", action="store_true", help="show where an error came from")
    words = root.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    _add_tune(_word(words, "tune", commands.tune, "search for the fastest kernels, save every trial", _TUNE))
    one = _word(words, "build", commands.build, "compile one variant and print ptxas's facts", _BUILD)
    one.add_argument("variant", metavar="VARIANT", help="family/name=value,.../arch, as inspect prints it")
    one.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write the cubin")
    _add_build_timeout(one)
    one = _word(words, "merge", commands.merge, "fold runs and databases into one database", _MERGE)
    one.add_argument("sources", nargs="+", type=Path, metavar="SOURCE", help="run directory, .jsonl or .h5")
    one.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the database (tuning_db/<profile>.h5)"
    )
    one = _word(words, "inspect", commands.inspect, "print what a database holds", _INSPECT)
    one.add_argument("database", type=Path, metavar="FILE")
    one.add_argument("--json", action="store_true", help="as one JSON object")
    one = _word(words, "verify", commands.verify, "check databases entry by entry", _VERIFY)
    one.add_argument("databases", nargs="+", type=Path, metavar="FILE")
    one = _word(words, "export", commands.export, "write a database as JSON lines, without loss", _EXPORT)
    one.add_argument("database", type=Path, metavar="FILE")
    one.add_argument("--json", action="store_true", help="the format (there is one, so it may be left out)")
    one.add_argument("-o", "--output", type=Path, metavar="FILE", help="instead of standard output")
    one = _word(words, "import", commands.import_, "write a database from JSON lines", _IMPORT)
    one.add_argument("source", type=Path, metavar="FILE", help="what export wrote; - is standard input")
    one.add_argument("-o", "--output", type=Path, metavar="FILE", required=True, help="the database")
    one.add_argument("--force", action="store_true", help="replace a database that is there")
    one = _word(words, "pack", commands.pack, "pick winners and write the runtime's file", _PACK)
    one.add_argument("database", type=Path, metavar="FILE")
    one.add_argument("-o", "--output", type=Path, metavar="FILE", help="the .ktpack (beside the database)")
    one.add_argument(
        "--noise-factor",
        type=_positive_float,
        metavar="X",
        help="how many times the noise a kernel must win by",
    )
    one.add_argument(
        "--min-gain",
        type=_positive_float,
        metavar="X",
        help="the least gain over the vendor that counts as a win (0.015 is 1.5%%)",
    )
    return root


def _word(
    words: argparse._SubParsersAction[_Parser],
    name: str,
    command: Callable[[argparse.Namespace], int],
    summary: str,
    epilog: str,
) -> argparse.ArgumentParser:
    made = words.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.set_defaults(command=command)
    return made


def _add_tune(word: argparse.ArgumentParser) -> None:
    add = word.add_argument
    add(
        "--problems",
        nargs="+",
        required=True,
        metavar="P",
        help="MxNxK[:layout[:dtype]], a suite file (.toml), or grid; several, or joined by commas",
    )
    elsewhere = "where a problem names none"
    add("--layout", type=_words_of("layout", LAYOUTS), default=(), metavar="L[,L]", help=elsewhere)
    add("--dtype", type=_words_of("dtype", DTYPES), default=(), metavar="D[,D]", help=elsewhere)
    add(
        "--profile",
        metavar="NAME",
        help="the device: sm90a-132, cpu-x86_64_v3 (default: the GPU if there is one)",
    )
    add("--budget", type=_budget, default=Budget(), metavar="B", help="300s, 2h, 20/problem or 2h,20/problem")
    strategies = strategy_names()
    add("--strategy", choices=strategies, default=strategies[0], help="how candidates are proposed")
    add("--seed", type=int, default=0, metavar="N", help="of the order of candidates")
    add(
        "--protocol",
        metavar="NAME",
        help="how time is taken: graph-hot, graph-cold, stream; cpu-stream, cpu-loop",
    )
    add("--jobs", type=_positive_int, metavar="N", help="compilers at a time (by cores and free memory)")
    _add_build_timeout(word)
    add("--run-dir", type=Path, metavar="DIR", help="journal and binaries (tuning_runs/<profile>)")
    add("--database", type=Path, metavar="FILE", help="merged into at the end (tuning_db/<profile>.h5)")
    add("--resume", action="store_true", help="go on with the run directory; nothing is measured twice")
    add("--dry-run", action="store_true", help="print the plan and stop")
    add("--quiet", action="store_true", help="no progress, only the summary")


def _add_build_timeout(word: argparse.ArgumentParser) -> None:
    limit = "seconds one compiler may take"
    word.add_argument("--build-timeout", type=_positive_float, default=60.0, metavar="S", help=limit)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 failure, 2 wrong use, 130 after Ctrl-C."""
    arguments = parser().parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = _print_warning
        try:
            code: int = arguments.command(arguments)
            sys.stdout.flush()
            return code
        except KeyboardInterrupt:
            print(f"{PROGRAM}: interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        except BrokenPipeError:
            # The reader of our output (head, less) has gone; keep Python from complaining when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_FAILURE
        except Exception as error:
            if arguments.debug:
                raise
            text, code = explain(error)
            print(f"{PROGRAM}: error: {text}", file=sys.stderr)
            return code


def explain(error: Exception) -> tuple[str, int]:
    """Return what to tell the user about an error, in one line, and the exit code."""
    from ktlib_generator.build.toolkit import ToolchainError
    from ktlib_generator.measure.worker import WorkerError

    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError):
        if (error.name or "").startswith("ktlib"):
            return f"{text}: the extension is not built; run pip install . in the repository", EXIT_FAILURE
        return f"{error.name} is not installed; run pip install 'ktlib[build]'", EXIT_FAILURE
    os_error = error if isinstance(error, OSError) else error.__cause__
    if isinstance(os_error, OSError):
        code = EXIT_FAILURE if os_error.errno in _DISK_FULL else EXIT_USAGE
        return (_explain_os_error(os_error) if error is os_error else text), code
    if isinstance(error, ValueError):
        return text, EXIT_USAGE
    if isinstance(error, ToolchainError | WorkerError):
        return text, EXIT_FAILURE
    return f"{type(error).__name__}: {text} (--debug shows where)", EXIT_FAILURE


def _explain_os_error(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in _DISK_FULL:
        advice = "free space and run again with --resume"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "change its permissions, or give another path"
    else:
        advice = "check the path"
    return f"{where}{error.strerror or error}; {advice}"


def _print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"{PROGRAM}: warning: {message}", file=sys.stderr)


def _words_of(kind: str, known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(word.strip() for word in text.split(",") if word.strip())
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{kind} {word!r} is unknown (have: {', '.join(known)})")
        return words

    return parse


def _budget(text: str) -> Budget:
    try:
        return Budget.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above zero, got {text!r}")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"expected a number above zero, got {text!r}")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
