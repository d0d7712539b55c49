"""Finds the CUDA toolkit's programs: from CUDA_HOME, PATH, pip's nvidia packages, the usual folder.

Must not run them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

USUAL_FOLDER = Path("/usr/local/cuda/bin")


class ToolchainError(RuntimeError):
    """A program that is needed is not here; the message says what to install."""


def find_tool(name: str) -> str:
    """Return the path of `nvcc`, `cuobjdump` or another of the toolkit's programs.

    Raises:
        ToolchainError: it is in none of the places.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [Path(home) / "bin" / name] if home else []
    on_path = shutil.which(name)
    candidates += [Path(on_path)] if on_path else []
    candidates += [*_pip_tools(name), USUAL_FOLDER / name]
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return str(candidate)
    raise ToolchainError(
        f"no {name}: pip install 'ktlib[nvcc]' (the compiler alone, the version that built the shipped "
        "kernels), or install the CUDA toolkit and put its bin folder on PATH or set CUDA_HOME"
    )


def _pip_tools(name: str) -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None else None
    return [tool for place in places or () for tool in sorted(Path(place).glob(f"cu*/bin/{name}"))]
