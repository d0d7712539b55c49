"""Folds journals and databases into one database; keeps every record, failures too.

Must not choose a winner, and must not take a record of another profile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ktlib.canonical import bytes_fingerprint
from ktlib_generator.store.files import StoreError, folder_lock, replace_whole, shown
from ktlib_generator.store.hdf5 import encode_database
from ktlib_generator.store.hdf5_read import read_database
from ktlib_generator.store.journal import JOURNAL_SUFFIX, journals_of, read_journal
from ktlib_generator.store.schema import DATABASE_SUFFIX, DatabaseError
from ktlib_generator.values import Record, Status

BinaryLoader = Callable[[str], bytes | None]


@dataclass(frozen=True)
class MergeSummary:
    """What a merge did: records now in the database, how many are new, and what was left out and why."""

    path: Path
    profile: str
    records: int
    new_records: int
    binaries: int
    missing_binaries: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()


@dataclass
class _Pool:
    """Distinct records by fingerprint, and what came with them."""

    records: dict[str, Record] = field(default_factory=dict)
    binaries: dict[str, bytes] = field(default_factory=dict)
    meta: dict[str, str] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    profile: str = ""
    profile_from: str = ""

    def take(self, source: str, profile: str, records: Iterable[Record]) -> None:
        """Add a source's records.

        Raises:
            DatabaseError: they are of another profile than those before.
        """
        if self.profile and profile != self.profile:
            raise DatabaseError(
                f"{source}: profile {profile}, but {self.profile_from} is of {self.profile};"
                " times of different devices do not mix: merge each profile into its own database"
            )
        self.profile, self.profile_from = profile, self.profile_from or source
        for record in records:
            self.records.setdefault(record.fingerprint(), record)


def merge(
    sources: Iterable[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    binary_loader: BinaryLoader | None = None,
    meta: Mapping[str, str] | None = None,
) -> MergeSummary:
    """Write every record of `sources` and of the database already at `path` as the database at `path`.

    A source is a database (`.h5`), a journal (`.jsonl`) or a run directory with journals. Doubles are
    dropped by fingerprint; nothing else is. `binary_loader` gives the bytes of a sha256 or None. A merge
    that brings nothing new leaves the file byte for byte as it is.

    Raises:
        StoreError: a source cannot be read, profiles differ, there is nothing to store, or `path` cannot
            be written; the old database is unchanged.
    """
    target = Path(path)
    with folder_lock(Path(os.path.realpath(target)).parent):
        pool = _Pool()
        old = 0
        if os.path.lexists(target):
            _take_database(pool, target)
            old = len(pool.records)
        for source in sources:
            _take(pool, Path(source))
        if not pool.records:
            raise DatabaseError(
                f"{shown(path)}: nothing to merge: the sources hold no whole record; tune first, or check"
                " the run directory"
            )
        pool.meta.update(meta or {})
        missing = _load_binaries(pool, binary_loader)
        image = encode_database(shown(path), pool.profile, pool.records, pool.binaries, pool.meta)
        replace_whole(target, image)
    return MergeSummary(
        path=target,
        profile=pool.profile,
        records=len(pool.records),
        new_records=len(pool.records) - old,
        binaries=len(pool.binaries),
        missing_binaries=tuple(missing),
        findings=tuple(pool.findings),
    )


def _take(pool: _Pool, source: Path) -> None:
    if source.is_dir():
        journals = journals_of(source)
        if not journals:
            raise StoreError(f"{shown(source)}: no journal (*{JOURNAL_SUFFIX}) here; give a run directory")
        for journal in journals:
            _take_journal(pool, journal)
    elif source.suffix == DATABASE_SUFFIX:
        _take_database(pool, source)
    elif source.suffix == JOURNAL_SUFFIX:
        _take_journal(pool, source)
    else:
        raise StoreError(
            f"{shown(source)}: expected a database (*{DATABASE_SUFFIX}), a journal (*{JOURNAL_SUFFIX}) or a"
            " run directory"
        )


def _take_journal(pool: _Pool, path: Path) -> None:
    content = read_journal(path)
    pool.findings.extend(content.findings)
    # A writer killed before its header was whole leaves no profile and no record.
    if content.profile:
        pool.take(shown(path), content.profile, content.records)


def _take_database(pool: _Pool, path: Path) -> None:
    database = read_database(path)
    pool.take(shown(path), database.profile, database.records)
    pool.binaries.update(database.binaries)
    pool.meta = {**database.meta, **pool.meta}


def _load_binaries(pool: _Pool, loader: BinaryLoader | None) -> list[str]:
    """Fetch the bytes that ok records name and no database brought; return the sha256 of those not found."""
    wanted = {
        record.binary.sha256
        for record in pool.records.values()
        if record.status is Status.OK and record.binary is not None and record.binary.format != "builtin"
    }
    missing = []
    for sha256 in sorted(wanted - pool.binaries.keys()):
        data = loader(sha256) if loader is not None else None
        if data is not None and bytes_fingerprint(data) == sha256:
            pool.binaries[sha256] = data
            continue
        missing.append(sha256)
        if data is not None:
            pool.findings.append(f"binary {sha256}: the bytes found are {bytes_fingerprint(data)}; left out")
    return missing
