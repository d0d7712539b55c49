"""Which databases are in use: KTLIB_DB_PATH first, then the shipped packs; loaded by the first product.

Must not select a kernel; the extension does, from the packs it is given here.
"""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path
from typing import Any

from ktlib import _core, env
from ktlib.errors import KtlibWarning

SHIPPED = Path(__file__).parent / "databases"
SUFFIX = ".ktpack"

_lock = threading.RLock()
_loaded = False


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # whoever held it is not in this process


os.register_at_fork(after_in_child=_after_fork)


def ensure_loaded() -> None:
    """Load the packs unless that has happened; each that cannot be used costs one warning."""
    global _loaded
    if _loaded:
        return
    with _lock:
        if _loaded:
            return
        enabled = not env.disabled()  # before anything is loaded: a wrong value is refused by every call
        paths, problems = _layers()
        _core.set_enabled(enabled)  # first: once packs are set, other threads' calls no longer wait here
        problems += _core.set_packs(paths)
        _loaded = True
    for problem in problems:
        warnings.warn(f"database not used: {problem}", KtlibWarning, stacklevel=3)


def load_database(path: str | os.PathLike[str]) -> None:
    """Put a pack in front of all others, for calls from now on; the others stay as they were loaded.

    One made for no device of this machine is put there too, with a warning.

    Raises:
        ValueError: the file is not a pack that can be used; the packs in use stay.
    """
    ensure_loaded()
    with _lock:
        _core.add_pack(os.path.abspath(os.fsdecode(path)))
        pack = _core.packs()[0]
    here = _why_for_nothing_here(pack)
    if here:
        text = f"database loaded, but nothing here uses it: {pack['path']} is for {pack['profile']}, {here}"
        warnings.warn(text, KtlibWarning, stacklevel=2)


def databases() -> list[dict[str, Any]]:
    """Return the packs in use, first searched first: path, profile, arch, and how much is in them."""
    ensure_loaded()
    return _core.packs()


def search_path() -> list[str]:
    """Return the path of every pack that is looked at, first searched first, usable or not."""
    return _layers()[0]


def misfit(path: str, device: dict[str, Any]) -> str:
    """Say why a pack is not used on a device; empty when it is. Asks the selection code itself."""
    call = {"m": 1, "n": 1, "k": 1, "layout": "nn", "dtype": "fp32"}
    reason: str = _core.find_choice([path], device, call)["reason"]
    return reason.partition(f"{path}: ")[2] if reason.startswith("no database fits") else ""


def preload(device: int | None = None) -> int:
    """Load every CUDA kernel that fits a device, or every device, and return how many were loaded.

    A kernel is otherwise loaded by its first launch, which a CUDA graph capture may refuse.

    Raises:
        RuntimeError: CUDA cannot be used, or there is no such device.
    """
    ensure_loaded()
    reason = _core.cuda_status()
    if reason:
        raise RuntimeError(f"preload: {reason}")
    count = 0
    for index in range(_core.cuda_device_count()) if device is None else (device,):
        loaded, failures = _core.preload(index)
        count += loaded
        for failure in failures:
            warnings.warn(failure, KtlibWarning, stacklevel=2)
    return count


def _why_for_nothing_here(pack: dict[str, Any]) -> str:
    """What this machine has instead of the pack's device; empty when that may be here.

    Does not open the CUDA driver, which a process must not do before it forks.
    """
    if pack["device_kind"] == "cpu":
        archs = _core.cpu_archs()
        return "" if pack["arch"] in archs else f"this CPU runs {', '.join(archs)}"
    import ctypes

    try:
        ctypes.CDLL(env.libcuda() or env.LIBCUDA.default)
    except OSError as error:
        return f"and there is no CUDA driver here ({error})"
    return ""


def _layers() -> tuple[list[str], list[str]]:
    """Paths in order of search, and a sentence for each place that has none."""
    paths: list[str] = []
    problems: list[str] = []
    for entry in env.db_paths():
        found = _packs_in(entry) if os.path.isdir(entry) else [entry]
        if not found:
            problems.append(f"{entry} (from {env.DB_PATH.name}) holds no {SUFFIX} file")
        paths += map(os.path.abspath, found)
    shipped = _packs_in(str(SHIPPED))
    if not shipped and not paths:
        problems.append(
            f"{SHIPPED} holds no {SUFFIX} file, so the vendor's library does everything; install ktlib again"
        )
    return paths + shipped, problems


def _packs_in(folder: str) -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    packs = sorted((name for name in names if name.endswith(SUFFIX)), key=_best_level_first)
    return [os.path.join(folder, name) for name in packs]


def _best_level_first(name: str) -> tuple[int, str]:
    # A CPU runs its own level's kernels and those of every lower one; the first pack that fits wins.
    archs = _core.cpu_archs()
    stem = name.removesuffix(SUFFIX)
    return (archs.index(stem) if stem in archs else len(archs), name)
