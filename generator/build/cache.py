"""The binary cache: compiled kernels by the fingerprint of everything that went into them.

Must not compile; a cache that cannot be written costs time, never a run.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import threading
import warnings
from pathlib import Path

from ktlib.canonical import bytes_fingerprint, canonical_json, fingerprint
from ktlib_generator.values import Binary

_METADATA = "binary.json"
_IMAGE = "image"


class BinaryCache:
    """A folder of binaries, one entry folder for each key, shared by threads and processes.

    An entry is written beside its place and renamed into it whole, so a reader sees all of it or
    nothing. Metadata and image are bound by checksums, and the metadata names its own key: an entry
    that was mixed up, cut off or flipped is discarded and counts as missing.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._key_locks: dict[str, threading.RLock] = {}
        self._warned = False

    @classmethod
    def default(cls) -> BinaryCache:
        """Return the cache of this user: KTLIB_CACHE_DIR, or a folder below the home directory."""
        from ktlib import env

        return cls(Path(env.cache_dir()) / "binaries")

    def path(self, key: str) -> Path:
        """Return where the entry of `key` is, whether or not it exists."""
        return self.root / key[:2] / key

    def key_lock(self, key: str) -> threading.RLock:
        """Return the re-entrant lock that threads of this process hold while they build `key`."""
        with self._lock:
            return self._key_locks.setdefault(key, threading.RLock())

    def load(self, key: str) -> Binary | None:
        """Return the binary of `key` with its bytes; None when there is none that can be trusted."""
        folder = self.path(key)
        try:
            text = (folder / _METADATA).read_text(encoding="ascii")
            image = (folder / _IMAGE).read_bytes()
        except (OSError, UnicodeDecodeError):
            binary = None
        else:
            binary = _checked(key, text, image)
        if binary is None and folder.exists():
            self._discard(folder)
        return binary

    def store(self, key: str, binary: Binary) -> Binary:
        """Keep `binary` and return it, or the one another process stored for `key` first.

        Where nothing can be written (read-only, disk full) it warns once and returns `binary`: the
        caller has the bytes either way.
        """
        try:
            self.path(key).parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{key[:8]}-", dir=self.root))
        except OSError as error:
            self._warn(error)
            return binary
        try:
            _write_synced(scratch / _METADATA, _metadata(key, binary).encode("ascii"))
            _write_synced(scratch / _IMAGE, binary.data)
            return self._publish(key, scratch, binary)
        except OSError as error:
            self._warn(error)
            return binary
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _publish(self, key: str, scratch: Path, binary: Binary) -> Binary:
        for _ in range(2):
            try:
                os.rename(scratch, self.path(key))
                return binary
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            # A lost race is a success: what is there was built from the same key. load() removes an entry
            # that cannot be trusted, so the second rename replaces it.
            winner = self.load(key)
            if winner is not None:
                return winner
        # There, but not visible yet (a network file system): ours is as good.
        return binary

    def _discard(self, folder: Path) -> None:
        # Renamed before it is removed, so no reader meets half of it.
        with contextlib.suppress(OSError):
            grave = Path(tempfile.mkdtemp(prefix=".bad-", dir=self.root))
            with contextlib.suppress(OSError):
                os.rename(folder, grave / "entry")
            shutil.rmtree(grave, ignore_errors=True)

    def _warn(self, error: OSError) -> None:
        with self._lock:
            warned, self._warned = self._warned, True
        if not warned:
            warnings.warn(
                f"binary cache {self.root}: cannot write ({error.strerror or error}); binaries are rebuilt "
                "in every run. Free space, or set KTLIB_CACHE_DIR to a writable folder",
                stacklevel=2,
            )


def _metadata(key: str, binary: Binary) -> str:
    value = binary.to_dict()
    checksum = fingerprint(kind="cache_entry", key=key, binary=value)
    return canonical_json({"key": key, "binary": value, "checksum": checksum})


def _checked(key: str, text: str, image: bytes) -> Binary | None:
    try:
        entry = json.loads(text)
        value = entry["binary"]
        if entry["checksum"] != fingerprint(kind="cache_entry", key=key, binary=value):
            return None
        binary = Binary.from_dict(value)
    except (ValueError, KeyError, TypeError):
        return None
    if binary.sha256 != bytes_fingerprint(image):
        return None
    return Binary(**value, data=image)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
