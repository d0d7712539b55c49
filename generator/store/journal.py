"""Journals: one checksummed JSON line per record, appended and synced as a search runs.

A killed writer leaves at most a torn last line. Must not judge records or know the database.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from ktlib.canonical import bytes_fingerprint, canonical_json
from ktlib_generator.store.files import (
    NO_LOCKS,
    StoreError,
    explain_os_error,
    read_whole,
    shown,
    sync_folder,
    write_all,
)
from ktlib_generator.values import Record

JOURNAL_FORMAT = "ktlib-journal"
JOURNAL_VERSION = 1
JOURNAL_SUFFIX = ".jsonl"
CHECKSUM_DIGITS = 16
MAX_JOURNAL_BYTES = 4 << 30

_HEADER_START = b'{"format":"' + JOURNAL_FORMAT.encode("ascii") + b'"'


class JournalError(StoreError):
    """A journal cannot be read or written."""


class JournalWarning(UserWarning):
    """A line of a journal was skipped; the text is `path:line: reason`."""


@dataclass(frozen=True)
class JournalContent:
    """What a journal holds.

    `findings` has one `path:line: reason` for each bad line. `whole_bytes` is where the next record
    goes: behind the last line that ends; `torn` says that bytes of an unfinished line follow.
    """

    profile: str
    records: tuple[Record, ...]
    findings: tuple[str, ...] = ()
    whole_bytes: int = 0
    torn: bool = False


def journals_of(run_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the journals of a run directory (one for each process that wrote there), by name."""
    return sorted(Path(run_dir).glob(f"*{JOURNAL_SUFFIX}"))


def read_journal(path: str | os.PathLike[str]) -> JournalContent:
    """Read every whole, correct line; bad ones become findings, a torn tail is skipped.

    Takes no lock, so a journal can be read while it is being written.

    Raises:
        JournalError: the file cannot be read, is not a journal, or is one of another version.
    """
    try:
        data = read_whole(path, MAX_JOURNAL_BYTES)
    except StoreError as error:
        raise JournalError(str(error)) from error
    return _parse(path, data)


def _line(kind: str, value: Any) -> bytes:
    text = canonical_json(value)
    checksum = bytes_fingerprint(text.encode("ascii"))[:CHECKSUM_DIGITS]
    return canonical_json({kind: value, "sha256": checksum}).encode("ascii") + b"\n"


def _header(profile: str) -> bytes:
    header = {"format": JOURNAL_FORMAT, "profile": profile, "version": JOURNAL_VERSION}
    return canonical_json(header).encode("ascii") + b"\n"


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number a record may hold")


def _parse_header(path: str | os.PathLike[str], line: bytes) -> str:
    try:
        header = json.loads(line)
        version, profile = header["version"], header["profile"]
        if header["format"] != JOURNAL_FORMAT or type(profile) is not str:
            raise ValueError("format or profile is wrong")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise JournalError(
            f"{shown(path)}:1: not a ktlib journal (its first line must be a header with format"
            f" {JOURNAL_FORMAT!r}): {error}; give another path"
        ) from error
    if version != JOURNAL_VERSION:
        raise JournalError(
            f"{shown(path)}:1: journal version {version!r}, this ktlib reads version {JOURNAL_VERSION};"
            " use the ktlib that wrote it to merge it into a database, or start a new run directory"
        )
    return profile


def _parse_record(line: bytes, profile: str) -> Record:
    """Read one record line; raises ValueError with the reason it is bad."""
    data = json.loads(line, parse_constant=_no_constant)
    if not isinstance(data, dict) or set(data) != {"record", "sha256"}:
        raise ValueError("expected an object with the fields record and sha256")
    checksum = bytes_fingerprint(canonical_json(data["record"]).encode("ascii"))[:CHECKSUM_DIGITS]
    if checksum != data["sha256"]:
        raise ValueError(f"checksum is {data['sha256']!r}, the line's is {checksum!r}: damaged")
    record = Record.from_dict(data["record"])
    if record.environment.profile != profile:
        raise ValueError(f"record of profile {record.environment.profile} in a journal of {profile}")
    return record


def _parse(path: str | os.PathLike[str], data: bytes) -> JournalContent:
    *whole, tail = data.split(b"\n")
    if not whole:
        if not _HEADER_START.startswith(tail[: len(_HEADER_START)]):
            raise JournalError(f"{shown(path)}:1: not a ktlib journal; give another path")
        return JournalContent("", (), torn=bool(tail))
    profile = _parse_header(path, whole[0])
    records: list[Record] = []
    findings: list[str] = []
    whole_bytes = len(data) - len(tail)
    for number, line in enumerate([*whole[1:], tail], start=2):
        is_tail = number == len(whole) + 1
        if not line and is_tail:
            continue
        try:
            records.append(_parse_record(line, profile))
            if is_tail:
                whole_bytes = len(data)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if not is_tail:
                findings.append(f"{shown(path)}:{number}: {error}; line skipped")
    return JournalContent(profile, tuple(records), tuple(findings), whole_bytes, torn=whole_bytes < len(data))


@dataclass
class Journal:
    """One journal file: read freely, written by one process at a time.

    The first `append` (or `open`) creates the file and its folder, takes an exclusive lock and cuts
    off a torn tail. Safe to call from several threads.
    """

    path: Path
    profile: str = ""
    _descriptor: int | None = field(default=None, repr=False)
    _mutex: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self.path = Path(self.path)

    def open(self) -> None:
        """Take the journal for writing now, so that an unusable path is found before work is done.

        Raises:
            JournalError: unwritable, held by another run, or not a journal of this version and profile.
        """
        with self._mutex:
            self._open(self.profile)

    def append(self, record: Record) -> None:
        """Add one record by one write and wait until it is on disk.

        Raises:
            JournalError: as `open`; the record is of another profile; or the write failed, in which case
                the journal is cut back to the records before and can be appended to again.
        """
        with self._mutex:
            self._open(record.environment.profile)
            assert self._descriptor is not None
            if record.environment.profile != self.profile:
                raise JournalError(
                    f"{shown(self.path)}: record of profile {record.environment.profile} in a journal of"
                    f" {self.profile}; use one run directory for each device profile"
                )
            self._write(self._descriptor, self._record_line(record))

    def records(self) -> list[Record]:
        """Return every correct record; each bad line is warned of as `path:line: reason`."""
        content = self._content()
        for finding in content.findings:
            warnings.warn(finding, JournalWarning, stacklevel=2)
        return list(content.records)

    def keys(self) -> set[str]:
        """Return the trials already made, as `Record.key` and `trial_key` name them."""
        return {record.key for record in self._content().records}

    def close(self) -> None:
        """Give the journal up; the lock ends. A later `append` takes it again."""
        with self._mutex:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _record_line(self, record: Record) -> bytes:
        """Spell a record and read it back, so that nothing is stored that a resumed run would skip."""
        try:
            line = _line("record", record.to_dict())
            if _parse_record(line, self.profile).fingerprint() != record.fingerprint():
                raise ValueError("it reads back as another value")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise JournalError(
                f"{shown(self.path)}: the record of {record.problem} {record.variant}"
                f" cannot be stored: {error}"
            ) from error
        return line

    def _content(self) -> JournalContent:
        if not os.path.exists(self.path):
            return JournalContent(self.profile, ())
        return read_journal(self.path)

    def _open(self, profile: str) -> None:
        if self._descriptor is not None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                raise JournalError(explain_os_error("write the journal", self.path, error)) from error
            raise JournalError(f"cannot write the journal {str(self.path)!r}: {error}") from error
        try:
            self._lock(descriptor)
            self._take(descriptor, profile)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return
            raise JournalError(
                f"{shown(self.path)}: another run is writing this journal; wait for it to end, stop it,"
                " or give another run directory"
            ) from error

    def _take(self, descriptor: int, profile: str) -> None:
        """Check the header, or write one, and repair the tail a killed writer left."""
        content = read_journal(self.path)
        if content.profile:
            if self.profile and content.profile != self.profile:
                raise JournalError(
                    f"{shown(self.path)}: journal of profile {content.profile}, wanted {self.profile};"
                    " use one run directory for each device profile"
                )
            self.profile = content.profile
            self._repair(descriptor, content)
            return
        self.profile = self.profile or profile
        if not self.profile:
            raise JournalError(f"{shown(self.path)}: a new journal needs a profile; give Journal one")
        os.ftruncate(descriptor, 0)
        self._write(descriptor, _header(self.profile))
        try:
            sync_folder(self.path.parent)
        except OSError as error:
            raise JournalError(explain_os_error("sync the folder of", self.path, error)) from error

    def _repair(self, descriptor: int, content: JournalContent) -> None:
        if content.torn:
            os.ftruncate(descriptor, content.whole_bytes)
        size = os.fstat(descriptor).st_size
        # A last record that is whole but for its line end is kept.
        if os.pread(descriptor, 1, size - 1) != b"\n":
            self._write(descriptor, b"\n")

    def _write(self, descriptor: int, line: bytes) -> None:
        size = os.fstat(descriptor).st_size
        try:
            write_all(descriptor, line)
            os.fsync(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise JournalError(
                explain_os_error("append to the journal", self.path, error)
                + " with --resume; every record before this one is kept"
            ) from error
