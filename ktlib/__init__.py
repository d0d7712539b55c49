"""Matrix products with the kernel that measured fastest, on torch, CuPy and NumPy arrays.

Must not import an array library, open a database or touch a GPU; the first product does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ktlib import _core, env
from ktlib._core import matmul

if TYPE_CHECKING:
    from ktlib.ops import explain
    from ktlib.packs import databases, load_database, preload
    from ktlib.problem import Choice, Problem

__version__ = "0.1.0"

__all__ = [
    "Choice",
    "Problem",
    "__version__",
    "databases",
    "explain",
    "load_database",
    "matmul",
    "preload",
]

_HOME = {
    "Choice": "ktlib.problem",
    "Problem": "ktlib.problem",
    "databases": "ktlib.packs",
    "explain": "ktlib.ops",
    "load_database": "ktlib.packs",
    "preload": "ktlib.packs",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'ktlib' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _first_fallback(a: Any, b: Any, out: Any, reason: str) -> Any:
    from ktlib import ops

    _core.set_fallback(ops.fallback)
    return ops.fallback(a, b, out, reason)


def _load_packs() -> None:
    from ktlib import packs

    packs.ensure_loaded()


# The extension cannot import Python; it is told where to go for what it does not do itself.
_core.set_fallback(_first_fallback)
_core.set_loader(_load_packs)
if env.libcuda():
    _core.set_libcuda(os.fsencode(env.libcuda()))
