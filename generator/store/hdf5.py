"""Writes the HDF5 database: equal content gives equal bytes, and a file is replaced whole or not at all.

Must not choose among records; the reader is in `hdf5_read`. Never appends to a file.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ktlib.canonical import bytes_fingerprint, canonical_json
from ktlib.problem import Problem
from ktlib_generator.store.files import folder_lock, replace_whole, shown
from ktlib_generator.store.hdf5_read import decode_database, read_database, verify
from ktlib_generator.store.schema import (
    ARRAYS,
    BLOB_ALIGN_BYTES,
    DATABASE_FORMAT,
    MAX_FILE_BYTES,
    SCHEMA_MAJOR,
    SCHEMA_MINOR,
    SEAL_BYTES,
    TABLES,
    Database,
    DatabaseError,
    Table,
    content_sha256,
    seal,
)
from ktlib_generator.values import Binary, Environment, Measurement, Record, Status

__all__ = ["Database", "DatabaseError", "encode_database", "read_database", "verify", "write_database"]

_V = TypeVar("_V")


def write_database(
    path: str | os.PathLike[str],
    records: Iterable[Record],
    binaries: Mapping[str, bytes],
    meta: Mapping[str, str] | None = None,
) -> None:
    """Write all records, and those of `binaries` that an ok record names, as the whole file at `path`.

    The order of `records` and doubles among them make no difference. `meta` is free text by name; no
    time or host enters by itself, so equal content gives equal bytes.

    Raises:
        DatabaseError: no records, records of several profiles, a value that cannot be stored, or a
            binary that is not its sha256. What is on disk is unchanged.
        StoreError: the path cannot be written; an older file there is unchanged.
    """
    where = shown(path)
    unique = {record.fingerprint(): record for record in records}
    profiles = sorted({record.environment.profile for record in unique.values()})
    if len(profiles) != 1:
        have = f"records of the profiles {', '.join(profiles)}" if profiles else "no records"
        raise DatabaseError(f"{where}: {have}; a database holds records of one profile, at least one")
    image = encode_database(where, profiles[0], unique, binaries, dict(meta or {}))
    folder = Path(os.path.realpath(path)).parent
    with folder_lock(folder):
        replace_whole(Path(path), image)


def encode_database(
    where: str,
    profile: str,
    records: Mapping[str, Record],
    binaries: Mapping[str, bytes],
    meta: dict[str, str],
) -> bytes:
    """Return the bytes of a database file of `records`, given by fingerprint and all of `profile`.

    Raises:
        DatabaseError: a value cannot be stored, or a binary is not its sha256; begins with `where`.
    """
    try:
        encoder = _Encoder(records, binaries)
        rows = encoder.rows()
        rows["meta"] = _utf8(canonical_json(_checked_meta(meta)))
    except (OverflowError, TypeError, AttributeError, UnicodeError, DatabaseError) as error:
        raise DatabaseError(f"{where}: a value cannot be stored: {error}") from error
    attributes: dict[str, str | int] = {
        "format": DATABASE_FORMAT,
        "schema_major": SCHEMA_MAJOR,
        "schema_minor": SCHEMA_MINOR,
        "profile": profile,
        "content_sha256": content_sha256(profile, list(records), list(encoder.blobs), meta),
    }
    image = _hdf5_image(attributes, rows)
    if len(image) > MAX_FILE_BYTES:
        raise DatabaseError(
            f"{where}: {len(image)} bytes, the limit is {MAX_FILE_BYTES}; write one database for each suite"
        )
    image = seal(image[SEAL_BYTES:]) + image[SEAL_BYTES:]
    # Read back before anything on disk changes: a value that does not survive would make the file unreadable.
    decode_database(f"{where} (not written)", image)
    return image


def _hdf5_image(attributes: Mapping[str, str | int], rows: Mapping[str, Any]) -> bytes:
    import h5py
    import numpy as np

    buffer = io.BytesIO()
    with h5py.File(buffer, "w", userblock_size=SEAL_BYTES, libver=("earliest", "v108")) as file:
        for name, value in attributes.items():
            text = isinstance(value, str)
            file.attrs[name] = np.bytes_(str(value).encode("utf-8")) if text else np.uint32(value)
        for element in (*TABLES, *ARRAYS):
            kind = np.dtype(element.dtype() if isinstance(element, Table) else element.type)
            content = rows[element.name]
            data = np.frombuffer(content, kind) if isinstance(content, bytes) else np.array(content, kind)
            # Blobs stay unfiltered so that they can be mapped; an empty dataset cannot be chunked.
            packed = {"compression": "gzip", "shuffle": True} if data.size and element.name != "blobs" else {}
            dataset = file.create_dataset(element.name, data=data, track_times=False, **packed)
            dataset.attrs["encoding"] = np.bytes_(b"table" if isinstance(element, Table) else b"array")
            dataset.attrs["encoding_version"] = np.uint32(element.encoding_version)
    return buffer.getvalue()


def _utf8(text: str) -> bytes:
    """Encode any str, also one with lone surrogates (a log cut inside a character)."""
    if not isinstance(text, str):
        raise DatabaseError(f"expected text, got {text!r}")
    return text.encode("utf-8", "surrogatepass")


def _checked_meta(meta: dict[str, str]) -> dict[str, str]:
    for name, value in meta.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise DatabaseError(f"meta must be text by name, got {name!r}: {value!r}")
    return meta


def _unsigned(value: int, bits: int = 32) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << bits:
        raise DatabaseError(f"expected a whole number of at most {bits} bits, got {value!r}")
    return int(value)


def _sorted_index(values: Iterable[_V], key: Callable[[_V], Any]) -> dict[_V, int]:
    """Number distinct values by `key`, so that row numbers do not depend on the order they came in."""
    return {value: row for row, value in enumerate(sorted(set(values), key=key))}


def _problem_key(problem: Problem) -> tuple[Any, ...]:
    return (problem.batch, problem.m, problem.n, problem.k, str(problem))


class _Encoder:
    """Turns records into rows: numbers the distinct values, and packs texts, samples and blobs."""

    def __init__(self, by_fingerprint: Mapping[str, Record], binaries: Mapping[str, bytes]) -> None:
        records = by_fingerprint.values()
        self.problems = _sorted_index((r.problem for r in records), _problem_key)
        self.variants = _sorted_index((r.variant for r in records), str)
        self.environments = _sorted_index((r.environment for r in records), Environment.fingerprint)
        used = [r.binary for r in records if r.binary is not None]
        self.binaries = _sorted_index(used, lambda b: (b.sha256, b.fingerprint()))
        wanted = {r.binary.sha256 for r in records if r.binary is not None and r.status is Status.OK}
        self.blobs = {sha256: binaries[sha256] for sha256 in sorted(wanted) if sha256 in binaries}
        self.records = sorted(by_fingerprint.items(), key=self._record_key)
        self.strings = bytearray()
        self.string_offsets: dict[bytes, int] = {}
        self.samples: list[float] = []
        self.blob_bytes = bytearray()
        self.blob_offsets: dict[str, int] = {}

    def rows(self) -> dict[str, Any]:
        """Return the content of every dataset but `meta`, by name."""
        for sha256, data in self.blobs.items():
            self._add_blob(sha256, data)
        return {
            "problems": [self._problem(problem) for problem in self.problems],
            "variants": [(*self._text(str(v)), v.fingerprint()) for v in self.variants],
            "environments": [self._environment(environment) for environment in self.environments],
            "binaries": [self._binary(binary) for binary in self.binaries],
            "records": [self._record(*item) for item in self.records],
            "strings": bytes(self.strings),
            "samples_us": self.samples,
            "blobs": bytes(self.blob_bytes),
        }

    def _record_key(self, item: tuple[str, Record]) -> tuple[Any, ...]:
        name, record = item
        return (
            self.problems[record.problem],
            self.variants[record.variant],
            self.environments[record.environment],
            record.measured_unix,
            name,
        )

    def _text(self, text: str) -> tuple[int, int]:
        data = _utf8(text)
        if not data:
            return 0, 0
        if data not in self.string_offsets:
            self.string_offsets[data] = len(self.strings)
            self.strings += data
        return self.string_offsets[data], _unsigned(len(data))

    def _samples(self, measurement: Measurement | None) -> tuple[int, ...]:
        if measurement is None:
            return (*self._text(""), *self._text(""), 0, 0)
        names = (*self._text(measurement.method), *self._text(measurement.protocol))
        offset = len(self.samples)
        self.samples.extend(measurement.samples_us)
        return (*names, offset, len(measurement.samples_us))

    def _add_blob(self, sha256: str, data: bytes) -> None:
        if not data or bytes_fingerprint(data) != sha256:
            raise DatabaseError(f"binary of {len(data)} bytes given as {sha256} is {bytes_fingerprint(data)}")
        self.blob_bytes += bytes(-len(self.blob_bytes) % BLOB_ALIGN_BYTES)
        self.blob_offsets[sha256] = len(self.blob_bytes)
        self.blob_bytes += data

    def _problem(self, p: Problem) -> tuple[Any, ...]:
        names = (p.layout, p.dtype, p.accumulate, p.epilogue)
        return (p.m, p.n, p.k, p.batch, *names, p.align, p.fingerprint())

    def _environment(self, e: Environment) -> tuple[Any, ...]:
        texts = (*self._text(e.device), *self._text(e.arch))
        facts = self._text(canonical_json(_checked_meta(dict(e.facts))))
        if type(e.dirty) is not bool:
            raise DatabaseError(f"environment: dirty must be true or false, got {e.dirty!r}")
        return (*texts, _unsigned(e.sm_count), *self._text(e.commit), e.dirty, *facts, e.fingerprint())

    def _binary(self, b: Binary) -> tuple[Any, ...]:
        texts = (*self._text(b.symbol), *self._text(b.sha256), *self._text(b.source))
        sizes = (_unsigned(b.registers), _unsigned(b.smem_bytes), _unsigned(b.spill_bytes))
        blob = (self.blob_offsets.get(b.sha256, 0), len(self.blobs.get(b.sha256, b"")))
        return (b.format, *texts, *sizes, *blob, b.fingerprint())

    def _record(self, name: str, r: Record) -> tuple[Any, ...]:
        rows = (self.problems[r.problem], self.variants[r.variant], self.environments[r.environment])
        binary = -1 if r.binary is None else self.binaries[r.binary]
        if type(r.measured_unix) is not int:
            raise DatabaseError(f"record: measured_unix must be whole seconds, got {r.measured_unix!r}")
        verification = (0, 0.0, *self._text(""))
        if r.verification is not None:
            checks = self._text(canonical_json(list(r.verification.checks)))
            verification = (1, float(r.verification.rms_ratio), *checks)
        timed = (*self._samples(r.measurement), *self._samples(r.baseline))
        end = (*verification, *self._text(r.log), name)
        return (*rows, binary, r.status.value, r.measured_unix, *timed, *end)
