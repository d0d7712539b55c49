"""A run directory: the journal of one tuning run, and the binaries its records name.

Must not know how a record came about; it keeps records and hands them to the database.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from ktlib_generator.store.files import StoreError, explain_os_error
from ktlib_generator.store.hdf5 import read_database
from ktlib_generator.store.journal import Journal, JournalWarning, journals_of, read_journal
from ktlib_generator.store.merge import MergeSummary, merge
from ktlib_generator.values import Binary, Record, Status

JOURNAL_NAME = "journal.jsonl"
BINARIES_NAME = "binaries"


class RunDir:
    """Reads and writes one run directory; as a context it holds the journal, so that no other run writes it.

    Binaries are kept beside the journal and not looked up in the build cache, so that a run can be merged
    on another machine, or after the cache was emptied.
    """

    def __init__(self, path: Path, profile: str) -> None:
        self.path = path
        self._journal = Journal(path / JOURNAL_NAME, profile)

    def __enter__(self) -> RunDir:
        self._journal.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self._journal.close()

    def records(self) -> list[Record]:
        """Return every correct record of every journal here; bad lines are warned of as `path:line`."""
        return records_of(self.path)

    def append(self, record: Record) -> None:
        """Keep one record for good: its binary first, then the journal line that names it.

        Raises:
            StoreError: a path cannot be written or the disk is full; what was there is unchanged.
        """
        if record.status is Status.OK and record.binary is not None and record.binary.data:
            self._keep_binary(record.binary)
        self._journal.append(record)

    def _keep_binary(self, binary: Binary) -> None:
        target = self.path / BINARIES_NAME / binary.sha256
        if target.exists():
            return
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor, scratch = tempfile.mkstemp(prefix=".new-", dir=target.parent)
            with os.fdopen(descriptor, "wb") as file:
                file.write(binary.data)
                file.flush()
                os.fsync(descriptor)
            os.replace(scratch, target)
        except OSError as error:
            raise StoreError(explain_os_error("keep a binary", target, error)) from error


def records_of(run_dir: Path) -> list[Record]:
    """Return every correct record of a run directory, and warn of each bad line."""
    records: list[Record] = []
    for path in journals_of(run_dir):
        content = read_journal(path)
        for finding in content.findings:
            warnings.warn(finding, JournalWarning, stacklevel=2)
        records += content.records
    return records


def merge_runs(database: Path, run_dirs: Sequence[Path]) -> MergeSummary:
    """Fold run directories into a database, with the binaries kept beside their journals.

    Raises:
        StoreError: as `store.merge.merge`; the old database is unchanged.
    """

    def load(sha256: str) -> bytes | None:
        for run_dir in run_dirs:
            with contextlib.suppress(OSError):
                return (run_dir / BINARIES_NAME / sha256).read_bytes()
        return None

    return merge(run_dirs, database, binary_loader=load)


def check_database(path: Path, profile: str) -> None:
    """Find out now, not after hours, whether records of `profile` can be merged into `path`.

    Raises:
        StoreError: it cannot be written, is damaged, or is of another profile.
    """
    check_writable(path)
    if path.exists():
        have = read_database(path).profile
        if have != profile:
            raise StoreError(
                f"{path}: a database of {have}, this run is for {profile}; give another --database"
            )


def check_writable(path: Path) -> None:
    """Make the folder of a file to be written, and find out now whether it can be written there.

    Raises:
        StoreError: it cannot, and why.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, scratch = tempfile.mkstemp(prefix=".probe-", dir=path.parent)
        os.close(descriptor)
        os.unlink(scratch)
    except OSError as error:
        raise StoreError(explain_os_error("write", path, error)) from error
