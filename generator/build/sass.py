"""Reads SASS for what ptxas's report cannot say: whether spills lie inside the loop that multiplies.

Must not compile anything.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from ktlib_generator.build.process import run_compiler
from ktlib_generator.build.toolkit import ToolchainError, find_tool

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);")
_BRANCH = re.compile(r"\bBRA(?:\.\w+)*\b.*?\b0x([0-9a-f]+)")
_MULTIPLY = re.compile(r"\b[HQIO]?G?MMA\b|\bHGMMA\b|\bHMMA\b")
_SPILL = re.compile(r"\b(LDL|STL)\b")


def disassemble(image: bytes) -> str:
    """Return the SASS of a cubin.

    Raises:
        ToolchainError: no disassembler, or it refused the file.
    """
    tool = find_tool("cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        # cuobjdump looks for nvdisasm on PATH, where pip does not put it.
        env = {**os.environ, "PATH": f"{Path(tool).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        run = run_compiler([tool, "-sass", file.name], timeout_s=60, env=env)
    if not run.ok:
        raise ToolchainError(f"{tool} -sass failed: {run.reason(60)}")
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


def spills_in_main_loop(image: bytes) -> list[str]:
    """Return the spill instructions in the innermost loop that multiplies; empty when it is clean.

    Raises:
        ToolchainError: as `disassemble`.
    """
    for body in loops(disassemble(image)):
        if any(_MULTIPLY.search(text) for text in body):
            return [text for text in body if _SPILL.search(text)]
    return []
