"""The command `ktlib`: what this installation has and why a call goes where it goes.

Must not tune, build or change anything; that is `ktlib-build`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import ktlib
from ktlib import _core, env, packs
from ktlib.problem import ELEMENT_BYTES, Choice, Problem, alignment_bytes

DESCRIPTION = """\
ktlib.matmul(a, b) runs a product with the kernel that measured fastest for its problem on this
device, and with the vendor's library where none did. These commands say what is installed and how
a call is decided; nothing is launched or changed. To fill a database for a new device or your own
shapes, see: ktlib-build --help"""

EPILOG = """\
examples:
  ktlib info                                    versions, devices, databases used or not, variables
  ktlib explain 4096x4096x1024                  M x N x K, both row-major, fp16, the first GPU
  ktlib explain 8x4096x4096:nt:bf16             a [N, K] weight passed as w.t(), bfloat16
  ktlib explain 64x64x64:nn:fp32 --device cpu   by the CPU's database
  KTLIB_DISABLE=1 python app.py                 the vendor for every call, to compare
"""

EXPLAIN_DESCRIPTION = """\
Says which kernel a call with this problem would launch, with which launch parameters, from which
database, and why; by the code that decides real calls. From Python, ktlib.explain(a, b) says the
same for two arrays.

A problem is MxNxK[:layout[:dtype]][:field=value ...], for C[M, N] = A[M, K] B[K, N].
  layout   nn, nt, tn or tt: A then B; n is row-major, t a transposed view. A [N, K] weight as
           w.t() is nt
  dtype    fp16, bf16 or fp32
  fields   batch=8, align=2 (bytes that divide every address and row stride), accumulate=fp16

tiers
  exact             this problem was tuned
  near              the kernel of a tuned problem near it
  model             the kernel that the generalisation model names
  vendor_algorithm  an algorithm of the vendor's that tuning found
  vendor            the vendor's own choice; the reason says why no kernel is used"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, 1 for unwritable output, 2 for bad arguments."""
    try:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")  # a path may be any bytes
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except OSError as error:
        _discard_output()
        if isinstance(error, BrokenPipeError):  # the reader has seen enough
            return 0
        print(f"ktlib: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1


def _discard_output() -> None:
    """Let the flush at exit find no broken file."""
    with contextlib.suppress(OSError, ValueError):  # not a real file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    for word in words:
        if re.match(r"-\d", word):  # argparse would take it for an option
            return _refuse(words[0], f"{word!r} is negative; extents are whole numbers from 0")
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help()
        return 0
    with warnings.catch_warnings():
        warnings.showwarning = _print_warning
        try:
            if arguments.command == "info":
                found = info()
                print(json.dumps(found, indent=2) if arguments.json else _info_text(found))
            else:
                problem, device = Problem.parse(arguments.problem), arguments.device or _default_device()
                device = "cuda:0" if device == "cuda" else device
                choice = explain(problem, device)
                print(choice if arguments.json else _choice_text(problem, device, choice))
        except ValueError as error:
            return _refuse(arguments.command, str(error))
    return 0


def _refuse(command: str, reason: str) -> int:
    print(f"ktlib {command}: {reason}", file=sys.stderr)
    return 2


def explain(problem: Problem, device: str) -> Choice:
    """Return the choice for a problem whose operands are laid out as it says, on `cpu` or `cuda:<index>`.

    Raises:
        ValueError: the device has another name or is not here, or KTLIB_DISABLE is neither 0 nor 1.
    """
    packs.ensure_loaded()
    if env.disabled():
        return Choice("", "vendor", f"kernels are switched off ({env.DISABLE.name}=1)")
    missing = _why_missing(device)
    if missing:
        raise ValueError(f"device {device!r} cannot be used here: {missing}. For the CPU: --device cpu")
    call = problem.to_dict() | {"align_ab": _operand_align(problem), "device": device}
    return Choice.from_dict(_core.explain(call))


def info() -> dict[str, Any]:
    """Return everything that `ktlib info` prints, in plain types."""
    return {
        "version": ktlib.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "extension": _core.__file__,
        "machine": platform.machine(),
        "cpu_archs": _core.cpu_archs(),
        "gpus": _gpus(),
        "gpu_missing": _core.cuda_status(),
        "databases": [_database(path) for path in packs.search_path()],
        "variables": [
            {"name": v.name, "value": v.value(), "meaning": v.meaning, "problem": env.problem_of(v)}
            for v in env.VARIABLES
        ],
    }


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("ktlib", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"ktlib {ktlib.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    show = commands.add_parser("info", help="versions, devices, databases and why one is not used, variables")
    show.add_argument("--json", action="store_true", help="for a program or a bug report")
    why = commands.add_parser(
        "explain",
        help="which kernel a problem gets, and why",
        description=EXPLAIN_DESCRIPTION,
        formatter_class=raw,
    )
    why.add_argument("problem", help="MxNxK[:layout[:dtype]], for example 4096x4096x1024:nt:bf16")
    why.add_argument("--device", help="cpu, or cuda for cuda:0; left out, the first GPU if there is one")
    why.add_argument("--json", action="store_true", help="the choice as JSON")
    return parser


def _default_device() -> str:
    return "cpu" if _core.cuda_status() or _core.cuda_device_count() == 0 else "cuda:0"


def _why_missing(device: str) -> str:
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index.isdecimal():
        return ""
    have = _core.cuda_device_count()
    return _core.cuda_status() or ("" if int(index) < have else f"there are {have} CUDA devices")


def _operand_align(problem: Problem) -> int:
    """Alignment of A and B alone: C's row stride does not count; a stated `align` is taken for all three."""
    if problem.align != problem.contiguous_align:
        return problem.align
    size = ELEMENT_BYTES[problem.dtype]
    lda = problem.k if problem.layout[0] == "n" else problem.m
    ldb = problem.n if problem.layout[1] == "n" else problem.k
    return alignment_bytes(lda * size, ldb * size)


def _gpus() -> list[dict[str, Any]]:
    if _core.cuda_status():
        return []
    return [_core.cuda_device(index) for index in range(_core.cuda_device_count())]


def _database(path: str) -> dict[str, Any]:
    """Describe one pack, and for each device of this machine why it is not used there (empty: it is)."""
    try:
        pack = _core.pack_info(path)
    except (ValueError, OSError) as error:
        return {"path": path, "refused": str(error)}
    devices = {"cpu": {"kind": "cpu", "cpu_archs": _core.cpu_archs()}}
    devices |= {f"cuda:{i}": {"kind": "cuda", **gpu} for i, gpu in enumerate(_gpus())}
    fits = {name: device for name, device in devices.items() if device["kind"] == pack["device_kind"]}
    return {
        "path": path,
        "profile": pack["profile"],
        "kernels": len(pack["kernels"]),
        "entries": len(pack["entries"]),
        "won": sum(bool(entry["kernel"]) for entry in pack["entries"]),
        "devices": {name: packs.misfit(path, device) for name, device in fits.items()},
        "refused": "" if fits else "it is for a GPU, and there is none here",
    }


def _info_text(found: dict[str, Any]) -> str:
    lines = [
        f"ktlib      {found['version']}",
        f"python     {found['python']}",
        f"extension  {found['extension']}",
    ]
    lines.append(f"cpu        {found['machine']}: {', '.join(found['cpu_archs'])}")
    for index, gpu in enumerate(found["gpus"]):
        lines.append(
            f"cuda:{index}     {gpu['name']}, compute capability {gpu['cc_major']}.{gpu['cc_minor']}, "
            f"{gpu['sm_count']} SMs, driver {gpu['driver_version']}"
        )
    if found["gpu_missing"]:
        lines.append(f"gpu        none: {found['gpu_missing']}")
    lines += ["", "databases, first searched first"]
    lines += [line for database in found["databases"] for line in _database_lines(database)]
    if not found["databases"]:
        lines.append(f"  none: no .ktpack in {packs.SHIPPED} and none named by {env.DB_PATH.name}")
    lines += ["", "environment variables"]
    for variable in found["variables"]:
        name, value = variable["name"], variable["value"] or "(not set)"
        lines.append(f"  {name:16} {value:12} {variable['meaning']}")
        if variable["problem"]:
            lines.append(f"  {'':16} refused, and so is every product: {variable['problem']}")
    return "\n".join(lines)


def _database_lines(database: dict[str, Any]) -> list[str]:
    lines = [f"  {database['path']}"]
    if "profile" in database:
        lines.append(
            f"    {database['profile']}: {database['entries']} problems, {database['won']} of them won by "
            f"{database['kernels']} kernels"
        )
    if database["refused"]:
        return [*lines, f"    not used: {database['refused']}"]
    return lines + [
        f"    not used on {name}: {misfit}" if misfit else f"    used on {name}"
        for name, misfit in database["devices"].items()
    ]


def _choice_text(problem: Problem, device: str, choice: Choice) -> str:
    lines = [f"problem   {problem} on {device}", f"tier      {choice.tier}"]
    lines.append(f"kernel    {choice.kernel or 'none, the vendor library'}")
    lines.append(f"reason    {choice.reason}")
    if choice.latency_us is not None and choice.vendor_us is not None:
        elsewhere = choice.tier == "near" or choice.reason.startswith("nearest tuned problem")
        whose = ", on the tuned problem that the reason names" if elsewhere else ""
        lines.append(f"measured  {choice.latency_us:.4g} us, vendor {choice.vendor_us:.4g} us{whose}")
    if choice.launch:
        lines.append("launch    " + ", ".join(f"{name}={value}" for name, value in choice.launch))
    if choice.database:
        lines.append(f"database  {choice.database}")
    return "\n".join(lines)


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"ktlib: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
