"""The environment variables ktlib knows, in one table; nothing else reads the environment.

Must not cache a value: a variable set before the first use counts, also after the import.
"""

from __future__ import annotations

import os
from typing import NamedTuple  # a dataclass costs 10 ms more at import


class Variable(NamedTuple):
    """One environment variable: its name, what holds when it is not set, and what it does."""

    name: str
    default: str
    meaning: str

    def value(self) -> str:
        """Return the value as set; empty when it is not set."""
        return os.environ.get(self.name, "")


DB_PATH = Variable(
    "KTLIB_DB_PATH",
    "none",
    "packs (`.ktpack`) or folders of them, colon-separated; searched before the shipped ones",
)
DISABLE = Variable("KTLIB_DISABLE", "0", "`1`: every product runs on the vendor's library")
LIBCUDA = Variable("KTLIB_LIBCUDA", "libcuda.so.1", "file of the CUDA driver library; read at import")
CACHE_DIR = Variable("KTLIB_CACHE_DIR", "~/.cache/ktlib", "where `ktlib-build` keeps compiled binaries")
COMMIT = Variable(
    "KTLIB_COMMIT",
    "git's answer",
    "commit that `ktlib-build` records with measurements outside a checkout",
)

VARIABLES = (DB_PATH, DISABLE, LIBCUDA, CACHE_DIR, COMMIT)

_warned_about: set[str] = set()


def db_paths() -> list[str]:
    """Return the entries of KTLIB_DB_PATH in order, without empty ones."""
    return [part for part in DB_PATH.value().split(":") if part]


def disabled() -> bool:
    """Say whether every product is to run on the vendor's library.

    Raises:
        ValueError: the variable holds something else than 0, 1 or nothing.
    """
    value = DISABLE.value()
    if value not in ("", "0", "1"):
        raise ValueError(f"{DISABLE.name} must be 0 or 1, got {value!r}")
    return value == "1"


def problem_of(variable: Variable) -> str:
    """Say what is wrong with a variable's value; empty when nothing is known to be."""
    if variable is DISABLE:
        try:
            disabled()
        except ValueError as error:
            return str(error)
    return ""


def libcuda() -> str:
    """Return the path of the CUDA driver library; empty for the system's."""
    return LIBCUDA.value()


def commit() -> str:
    """Return the commit to record where git cannot say; empty when none is given."""
    return COMMIT.value()


def cache_dir() -> str:
    """Return a folder that can be written, for compiled binaries.

    Where neither the variable's folder nor the default can be made and written, a folder of this
    user's below the system's temporary folder serves, with one warning.
    """
    wanted = CACHE_DIR.value() or os.path.join(os.path.expanduser("~"), ".cache", "ktlib")
    problem = _why_not_writable(wanted)
    if not problem:
        return wanted
    import tempfile
    import warnings

    from ktlib.errors import KtlibWarning

    instead = os.path.join(tempfile.gettempdir(), f"ktlib-{os.getuid()}")
    reason = _why_not_writable(instead)
    if not reason and os.stat(instead).st_uid != os.getuid():
        reason = f"{instead} belongs to another user"
    if reason:  # somebody else's folder of that name
        instead = tempfile.mkdtemp(prefix="ktlib-")
    if wanted not in _warned_about:
        _warned_about.add(wanted)
        warnings.warn(
            f"binaries are kept in {instead}, because {problem}. "
            f"Set {CACHE_DIR.name} to a folder that can be written",
            KtlibWarning,
            stacklevel=2,
        )
    return instead


def _why_not_writable(folder: str) -> str:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        return f"{folder} cannot be made ({error.strerror})"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written"
