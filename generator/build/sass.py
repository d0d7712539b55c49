"""Reads SASS for what ptxas's report cannot say: whether spills lie inside the loop that multiplies.

Must not compile anything. The disassembler is the toolkit's, or the one on PATH.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from ktlib_generator.build.process import run_compiler

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);")
_BRANCH = re.compile(r"\bBRA(?:\.\w+)*\b.*?\b0x([0-9a-f]+)")
_MULTIPLY = re.compile(r"\b[HQIO]?G?MMA\b|\bHGMMA\b|\bHMMA\b")
_SPILL = re.compile(r"\b(LDL|STL)\b")


class DisassemblerMissingError(RuntimeError):
    """Neither cuobjdump nor nvdisasm is here."""


def disassemble(image: bytes, nvcc: str | None = None) -> str:
    """Return the SASS of a cubin.

    Raises:
        DisassemblerMissingError: no disassembler, or it refused the file.
    """
    folder = str(Path(nvcc).parent) if nvcc else None
    tool = (shutil.which("cuobjdump", path=folder) if folder else None) or shutil.which("cuobjdump")
    if tool is None:
        raise DisassemblerMissingError("no cuobjdump to see where they are (it comes with the CUDA toolkit)")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        run = run_compiler([tool, "-sass", file.name], timeout_s=60)
    if not run.ok:
        raise DisassemblerMissingError(f"cuobjdump failed: {run.reason(60)}")
    return run.log


def loops(sass: str) -> list[list[str]]:
    """Return the instructions of every backward branch's range, smallest first."""
    code = [(int(m.group(1), 16), m.group(2)) for m in map(_INSTRUCTION.match, sass.splitlines()) if m]
    ranges = []
    for address, text in code:
        branch = _BRANCH.search(text)
        if branch and int(branch.group(1), 16) < address:
            ranges.append((int(branch.group(1), 16), address))
    ranges.sort(key=lambda r: r[1] - r[0])
    return [[text for address, text in code if first <= address <= last] for first, last in ranges]


def spills_in_main_loop(image: bytes, nvcc: str | None = None) -> list[str]:
    """Return the spill instructions in the innermost loop that multiplies; empty when it is clean.

    Raises:
        DisassemblerMissingError: as `disassemble`.
    """
    for body in loops(disassemble(image, nvcc)):
        if any(_MULTIPLY.search(text) for text in body):
            return [text for text in body if _SPILL.search(text)]
    return []
