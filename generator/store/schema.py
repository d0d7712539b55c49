"""The database's schema: tables, columns, versions, limits and the seal; tuning_db/README.md explains each.

Must not read or write a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ktlib.canonical import bytes_fingerprint, fingerprint
from ktlib_generator.store.files import StoreError
from ktlib_generator.values import Record

DATABASE_FORMAT = "ktlib-tuning-database"
DATABASE_SUFFIX = ".h5"
SCHEMA_MAJOR = 1
SCHEMA_MINOR = 0
ENCODING_VERSION = 1

SEAL_BYTES = 512
BLOB_ALIGN_BYTES = 64

MAX_FILE_BYTES = 1 << 30
MAX_DATASET_BYTES = 1 << 30
MAX_CHUNK_BYTES = 1 << 26
MAX_ATTRIBUTE_BYTES = 1 << 12
MAX_INFLATION = 1000

HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"

ASK_VERIFY = "; `ktlib-build verify` names what is damaged"


class DatabaseError(StoreError):
    """A database cannot be read or written; the text begins with its path."""


@dataclass(frozen=True)
class Column:
    """One column of a table: NumPy type, and the schema minor version that brought it.

    A file older than `since` lacks the column; the reader puts `default` there.
    """

    name: str
    type: str
    since: int = 0
    default: Any = 0


@dataclass(frozen=True)
class Table:
    """One compound dataset. `encoding_version` is that of the dataset, apart from the schema's."""

    name: str
    columns: tuple[Column, ...]
    encoding_version: int = ENCODING_VERSION

    def dtype(self) -> list[tuple[str, str]]:
        """Return the compound type as NumPy takes it."""
        return [(column.name, column.type) for column in self.columns]


@dataclass(frozen=True)
class Array:
    """One plain dataset of numbers."""

    name: str
    type: str
    encoding_version: int = ENCODING_VERSION


def _text(name: str) -> tuple[Column, Column]:
    """A text of any length: a slice of the `strings` dataset."""
    return Column(f"{name}_offset", "<u8"), Column(f"{name}_bytes", "<u4")


_FINGERPRINT = Column("fingerprint", "|S64")

PROBLEMS = Table(
    "problems",
    (
        Column("m", "<u4"),
        Column("n", "<u4"),
        Column("k", "<u4"),
        Column("batch", "<u4"),
        Column("layout", "|S8"),
        Column("dtype", "|S8"),
        Column("accumulate", "|S8"),
        Column("epilogue", "|S32"),
        Column("align", "<u4"),
        _FINGERPRINT,
    ),
)
VARIANTS = Table("variants", (*_text("text"), _FINGERPRINT))
ENVIRONMENTS = Table(
    "environments",
    (
        *_text("device"),
        *_text("arch"),
        Column("sm_count", "<u4"),
        *_text("commit"),
        Column("dirty", "|u1"),
        *_text("facts"),
        _FINGERPRINT,
    ),
)
BINARIES = Table(
    "binaries",
    (
        Column("format", "|S16"),
        *_text("symbol"),
        *_text("sha256"),
        *_text("source"),
        Column("registers", "<u4"),
        Column("smem_bytes", "<u4"),
        Column("spill_bytes", "<u4"),
        Column("blob_offset", "<u8"),
        Column("blob_bytes", "<u8"),
        _FINGERPRINT,
    ),
)
RECORDS = Table(
    "records",
    (
        Column("problem", "<u4"),
        Column("variant", "<u4"),
        Column("environment", "<u4"),
        Column("binary", "<i4"),
        Column("status", "|S16"),
        Column("measured_unix", "<i8"),
        *_text("measurement_method"),
        *_text("measurement_protocol"),
        Column("measurement_offset", "<u8"),
        Column("measurement_samples", "<u4"),
        *_text("baseline_method"),
        *_text("baseline_protocol"),
        Column("baseline_offset", "<u8"),
        Column("baseline_samples", "<u4"),
        Column("verified", "|u1"),
        Column("rms_ratio", "<f8"),
        *_text("checks"),
        *_text("log"),
        _FINGERPRINT,
    ),
)
STRINGS = Array("strings", "|u1")
SAMPLES = Array("samples_us", "<f8")
BLOBS = Array("blobs", "|u1")
META = Array("meta", "|u1")

TABLES = (PROBLEMS, VARIANTS, ENVIRONMENTS, BINARIES, RECORDS)
ARRAYS = (STRINGS, SAMPLES, BLOBS, META)

# Root attributes: name -> type. All are needed; others are ignored.
ATTRIBUTES = {
    "format": str,
    "schema_major": int,
    "schema_minor": int,
    "profile": str,
    "content_sha256": str,
}


@dataclass(frozen=True)
class Database:
    """A database in memory: every record, the binaries by sha256, and what the writer said about it.

    `content_sha256` names the content, however it is encoded.
    """

    records: tuple[Record, ...]
    binaries: dict[str, bytes] = field(default_factory=dict)
    meta: dict[str, str] = field(default_factory=dict)
    profile: str = ""
    content_sha256: str = ""


def content_sha256(profile: str, records: list[str], binaries: list[str], meta: dict[str, str]) -> str:
    """Name a database's content by the fingerprints of its records and blobs, in any order."""
    return fingerprint(
        kind="database", profile=profile, records=sorted(records), binaries=sorted(binaries), meta=meta
    )


def seal(body: bytes) -> bytes:
    """Return the first bytes of a file whose HDF5 part is `body`: its size and sha256, as text for `head`."""
    text = (
        f"{DATABASE_FORMAT} {SCHEMA_MAJOR}.{SCHEMA_MINOR}\n"
        f"bytes {len(body)}\nsha256 {bytes_fingerprint(body)}\n"
    )
    return text.encode("ascii").ljust(SEAL_BYTES, b"\0")


_SEAL = re.compile(
    rb"\A" + DATABASE_FORMAT.encode("ascii") + rb" (\d{1,9})\.(\d{1,9})\nbytes (\d{1,19})\n"
    rb"sha256 ([0-9a-f]{64})\n\0+\Z"
)


def check_seal(path: str, data: bytes) -> None:
    """Refuse a file that is not what was written, before any HDF5 code sees it.

    Raises:
        DatabaseError: not a database, of another major version, truncated, or changed anywhere.
    """
    match = _SEAL.match(data[:SEAL_BYTES])
    if match is None:
        kind = "an HDF5 file" if data.startswith(HDF5_SIGNATURE) else f"{len(data)} bytes"
        raise DatabaseError(
            f"{path}: no seal in the first {SEAL_BYTES} bytes ({kind}): not a ktlib database, or its start"
            " was damaged; restore it, or merge the journals again"
        )
    check_version(path, int(match[1]))
    body = memoryview(data)[SEAL_BYTES:]
    if len(body) != int(match[3]):
        raise DatabaseError(
            f"{path}: {len(body)} bytes after the seal, {int(match[3])} were written: truncated or extended;"
            " restore it, or merge the journals again"
        )
    if bytes_fingerprint(bytes(body)) != match[4].decode("ascii"):
        raise DatabaseError(
            f"{path}: sha256 of the file differs from its seal: damaged, or changed by another tool"
            + ASK_VERIFY
        )


def check_version(path: str, major: int) -> None:
    """Refuse another major version; a newer minor one is read without what it added."""
    if major != SCHEMA_MAJOR:
        raise DatabaseError(
            f"{path}: schema {major}.x, this ktlib reads schema {SCHEMA_MAJOR}.x; use the ktlib that wrote it"
            " to export JSON, and import that"
        )
