"""Files the store touches: read whole with limits, replaced whole and atomically, locked by folder.

Must not know what is inside them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
TEMPORARY_PREFIX = ".ktlib-"
READ = "read"
LOCK_WAIT_S = 60.0


class StoreError(ValueError):
    """A journal or database cannot be read or written; the text says which, why and what to do."""


def shown(path: str | os.PathLike[str]) -> str:
    """Spell a path so that it prints anywhere, also one that is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def explain_os_error(action: str, path: str | os.PathLike[str], error: OSError) -> str:
    """Say what failed on which path, why, and what to do about it."""
    if error.errno in FULL_DISK:
        advice = "free space on that file system (or raise the quota or file size limit) and run again"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and action == READ:
        advice = "you may not read it: change its permissions, or run as a user who may"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "choose a folder you may write to, or change its permissions"
    elif error.errno == errno.ENOENT:
        advice = "check the spelling, and that the folder exists"
    elif error.errno == errno.EISDIR:
        advice = "give the path of a file, not of a folder"
    elif error.errno == errno.ENAMETOOLONG:
        advice = "use a shorter path"
    else:
        advice = "check the path and its file system"
    return f"{shown(path)}: cannot {action}: {error.strerror or error}; {advice}"


def read_whole(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`; never blocks on a pipe or a lock.

    Raises:
        StoreError: not there, not a regular file, too large, or not readable.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise StoreError(f"{shown(path)}: not a regular file; give the path of a database or journal")
            if facts.st_size > max_bytes:
                raise StoreError(f"{shown(path)}: {facts.st_size} bytes; the limit is {max_bytes}")
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise StoreError(explain_os_error(READ, path, error)) from error
    except ValueError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"cannot read {os.fspath(path)!r}: {error}") from error
    if len(data) > max_bytes:
        raise StoreError(f"{shown(path)}: grew past the limit of {max_bytes} bytes while being read")
    return data


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte; a short write (disk filling up) is continued until the system says why it stops."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(folder: Path) -> None:
    """Make a rename or a new name in `folder` durable; file systems that cannot are left alone."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the folder for one writer, so two merges into one database cannot lose each other's records.

    The lock is on the folder itself (no lock file is left) and ends with the process. Readers never
    take it. File systems without locks are used without one.

    Raises:
        StoreError: the folder cannot be opened, or another writer holds it for longer than the wait.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(explain_os_error("use the folder", folder, error)) from error
    try:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in NO_LOCKS:
                    break
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"{shown(folder)}: another run has been writing a database here for"
                        f" {LOCK_WAIT_S:.0f} s; wait for it to end, or write into another folder"
                    ) from error
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def replace_whole(path: Path, data: bytes) -> None:
    """Put `data` at `path` by a synced temporary file and a rename; the caller holds `folder_lock`.

    Whatever fails or dies on the way, `path` holds either the old bytes or the new ones. A symbolic
    link is followed, permissions of an old file are kept, and temporaries of killed writers are removed.

    Raises:
        StoreError: the folder is not writable, or the disk is full; the old file is as it was.
    """
    target = Path(os.path.realpath(path))
    temporary = target.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}.tmp"
    try:
        for stale in target.parent.glob(f"{TEMPORARY_PREFIX}*.tmp"):
            stale.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(descriptor, stat.S_IMODE(os.stat(target).st_mode))
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason = explain_os_error("write", path, error)
        raise StoreError(f"{reason} (an older file there is unchanged)") from error
