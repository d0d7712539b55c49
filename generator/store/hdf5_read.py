"""Reads the HDF5 database as the untrusted file it may be, and verifies it entry by entry.

Order: size, seal, then HDF5 from memory with an allow-list, then bounds, then a checksum for every
entry. Must not write, and must not follow anything out of the file.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ktlib.canonical import bytes_fingerprint
from ktlib.problem import Problem
from ktlib_generator.store.files import StoreError, read_whole, shown
from ktlib_generator.store.hdf5_guard import Content, read_content
from ktlib_generator.store.schema import (
    ASK_VERIFY,
    MAX_FILE_BYTES,
    Database,
    DatabaseError,
    check_seal,
    content_sha256,
)
from ktlib_generator.values import (
    Binary,
    Environment,
    Measurement,
    Record,
    Status,
    Variant,
    Verification,
)

_V = TypeVar("_V")
_Row = Mapping[str, Any]


def read_database(path: str | os.PathLike[str]) -> Database:
    """Read and check a whole database.

    Takes no lock and reads the file once, so a database replaced meanwhile is seen old or new, never mixed.

    Raises:
        DatabaseError: beginning with the path, and saying what is wrong with it.
    """
    return decode_database(shown(path), _file(path))


def decode_database(where: str, data: bytes) -> Database:
    """Check and rebuild a database from the bytes of its file; `where` begins every message.

    Raises:
        DatabaseError: saying what is wrong with it.
    """
    check_seal(where, data)
    findings: list[str] = []
    database = _decode(where, data, findings)
    if findings:
        more = f" (and {len(findings) - 1} more; `ktlib-build verify` lists them)" if findings[1:] else ""
        raise DatabaseError(findings[0] + more)
    return database


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Return everything that is wrong with a database, one line each; empty when it is sound.

    Goes on behind a broken seal to name the damaged entries, or says that none is.
    """
    where = shown(path)
    findings: list[str] = []
    try:
        data = _file(path)
        try:
            check_seal(where, data)
        except DatabaseError as error:
            findings.append(str(error).removesuffix(ASK_VERIFY))
        broken_seal = len(findings)
        database = _decode(where, data, findings)
        if not database.records:
            findings.append(f"{where}: holds no records")
        if broken_seal and len(findings) == broken_seal:
            findings.append(
                f"{where}: every entry was read and is sound: the damage is in the seal or in unused bytes;"
                " restore the file, or merge its runs again"
            )
    except DatabaseError as error:
        if str(error) not in findings:
            findings.append(str(error))
    return findings


def _file(path: str | os.PathLike[str]) -> bytes:
    try:
        return read_whole(path, MAX_FILE_BYTES)
    except StoreError as error:
        raise DatabaseError(str(error)) from error


def _decode(where: str, data: bytes, findings: list[str]) -> Database:
    """Rebuild every entry; an entry that is wrong is left out and named in `findings`.

    Raises:
        DatabaseError: the HDF5 structure itself is not acceptable.
    """
    return _Decoder(where, read_content(where, io.BytesIO(data), len(data)), findings).database()


class _Decoder:
    """Rebuilds values from rows; every offset is checked, every entry compared with its fingerprint."""

    def __init__(self, where: str, content: Content, findings: list[str]) -> None:
        self.where = where
        self.content = content
        self.findings = findings
        self.texts: dict[tuple[int, int], str] = {}
        self.text_budget = len(content.strings)
        self.sample_budget = len(content.samples)
        self.blob_budget = len(content.blobs)
        self.blob_sha256: dict[tuple[int, int], str] = {}
        self.binaries: dict[str, bytes] = {}

    def database(self) -> Database:
        """Rebuild everything and compare it with the content's name."""
        content = self.content
        problems = self._table("problems", self._problem, Problem.fingerprint)
        variants = self._table("variants", self._variant, Variant.fingerprint)
        environments = self._table("environments", self._environment, Environment.fingerprint)
        binaries = self._table("binaries", self._binary, Binary.fingerprint)

        def record(row: _Row) -> Record:
            return self._record(
                row,
                problem=_entry("problem", problems, row["problem"]),
                variant=_entry("variant", variants, row["variant"]),
                environment=_entry("environment", environments, row["environment"]),
                binary=None if row["binary"] == -1 else _entry("binary", binaries, row["binary"]),
            )

        decoded = self._table("records", record, Record.fingerprint)
        records = tuple(value for value in decoded if value is not None)
        meta = self._meta()
        if not self.findings:
            # Each has just been compared with its row's.
            fingerprints = [_name(row["fingerprint"]) for row in content.tables["records"]]
            found = content_sha256(content.profile, fingerprints, list(self.binaries), meta)
            if found != content.content_sha256:
                self._finding(f"content_sha256 is {content.content_sha256}, the content's is {found}")
        return Database(records, self.binaries, meta, content.profile, content.content_sha256)

    def _finding(self, text: str) -> None:
        self.findings.append(f"{self.where}: {text}")

    def _table(
        self, name: str, build: Callable[[_Row], _V], fingerprint_of: Callable[[_V], str]
    ) -> list[_V | None]:
        values: list[_V | None] = []
        for number, row in enumerate(self.content.tables[name]):
            try:
                value = build(row)
                stored, found = _name(row["fingerprint"]), fingerprint_of(value)
                if stored != found:
                    raise ValueError(f"fingerprint is {stored}, the entry's is {found}: damaged")
                values.append(value)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                self._finding(f"{name}[{number}]: {error}")
                values.append(None)
        return values

    def _text(self, row: _Row, name: str) -> str:
        place = row[f"{name}_offset"], row[f"{name}_bytes"]
        if not place[1]:
            _empty(row, f"{name}_offset")
            return ""
        if place not in self.texts:
            # Distinct slices never overlap when written, so a file cannot make them add up to more.
            self.text_budget -= place[1]
            data = _slice(f"{name} text", self.content.strings, *place)
            if self.text_budget < 0:
                raise ValueError(f"{name}: the texts overlap")
            self.texts[place] = data.decode("utf-8", "surrogatepass")
        return self.texts[place]

    def _problem(self, row: _Row) -> Problem:
        names = {name: _name(row[name]) for name in ("layout", "dtype", "accumulate", "epilogue")}
        return Problem.from_dict({**{name: row[name] for name in ("m", "n", "k", "batch", "align")}, **names})

    def _variant(self, row: _Row) -> Variant:
        return Variant.parse(self._text(row, "text"))

    def _environment(self, row: _Row) -> Environment:
        environment = Environment(
            device=self._text(row, "device"),
            arch=self._text(row, "arch"),
            sm_count=row["sm_count"],
            commit=self._text(row, "commit"),
            dirty=_flag("dirty", row["dirty"]),
            facts=tuple(_text_mapping("facts", self._text(row, "facts")).items()),
        )
        if environment.profile != self.content.profile:
            raise ValueError(f"profile {environment.profile} in a database of {self.content.profile}")
        return environment

    def _binary(self, row: _Row) -> Binary:
        binary = Binary(
            format=_name(row["format"]),
            symbol=self._text(row, "symbol"),
            sha256=self._text(row, "sha256"),
            source=self._text(row, "source"),
            registers=row["registers"],
            smem_bytes=row["smem_bytes"],
            spill_bytes=row["spill_bytes"],
        )
        self._take_blob(binary.sha256, row)
        return binary

    def _take_blob(self, sha256: str, row: _Row) -> None:
        place = row["blob_offset"], row["blob_bytes"]
        if not place[1]:
            _empty(row, "blob_offset")
            return
        if place not in self.blob_sha256:
            self.blob_budget -= place[1]
            blob = _slice("blob", self.content.blobs, *place)
            if self.blob_budget < 0:
                raise ValueError("the blobs overlap")
            self.blob_sha256[place] = bytes_fingerprint(blob)
        if self.blob_sha256[place] != sha256:
            raise ValueError(f"blob's sha256 is {self.blob_sha256[place]}, not {sha256}: damaged")
        self.binaries[sha256] = self.content.blobs[place[0] : place[0] + place[1]]

    def _measurement(self, row: _Row, name: str) -> Measurement | None:
        offset, count = row[f"{name}_offset"], row[f"{name}_samples"]
        if not count:
            texts = (f"{name}_{part}" for part in ("method", "protocol"))
            _empty(row, f"{name}_offset", *(f"{text}_{end}" for text in texts for end in ("offset", "bytes")))
            return None
        self.sample_budget -= count
        if offset + count > len(self.content.samples) or self.sample_budget < 0:
            raise ValueError(
                f"{name}: samples {offset}..{offset + count} of {len(self.content.samples)}, or shared"
            )
        samples = tuple(self.content.samples[offset : offset + count].tolist())
        return Measurement(self._text(row, f"{name}_method"), self._text(row, f"{name}_protocol"), samples)

    def _verification(self, row: _Row) -> Verification | None:
        if not _flag("verified", row["verified"]):
            _empty(row, "rms_ratio", "checks_offset", "checks_bytes")
            return None
        checks = json.loads(self._text(row, "checks"))
        if not isinstance(checks, list) or not all(isinstance(check, str) for check in checks):
            raise ValueError("checks must be a list of texts")
        return Verification(row["rms_ratio"], tuple(checks))

    def _record(
        self,
        row: _Row,
        *,
        problem: Problem,
        variant: Variant,
        environment: Environment,
        binary: Binary | None,
    ) -> Record:
        return Record(
            problem=problem,
            variant=variant,
            environment=environment,
            status=Status(_name(row["status"])),
            measured_unix=row["measured_unix"],
            measurement=self._measurement(row, "measurement"),
            baseline=self._measurement(row, "baseline"),
            verification=self._verification(row),
            binary=binary,
            log=self._text(row, "log"),
        )

    def _meta(self) -> dict[str, str]:
        try:
            return _text_mapping("meta", self.content.meta.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            self._finding(f"meta: {error}")
            return {}


def _empty(row: _Row, *names: str) -> None:
    """Refuse a value where there is nothing to hold one, so that no cell can change unseen."""
    for name in names:
        if row[name] != 0:
            raise ValueError(f"{name} is {row[name]!r} where it must be empty")


def _entry(kind: str, values: list[_V | None], row: int) -> _V:
    if not 0 <= row < len(values):
        raise ValueError(f"{kind} row {row} of {len(values)}")
    value = values[row]
    if value is None:
        raise ValueError(f"its {kind} (row {row}) is damaged")
    return value


def _slice(what: str, data: bytes, offset: int, count: int) -> bytes:
    if offset + count > len(data):
        raise ValueError(f"{what}: bytes {offset}..{offset + count} of {len(data)}")
    return data[offset : offset + count]


def _name(data: bytes) -> str:
    return data.decode("ascii")


def _flag(what: str, value: int) -> bool:
    if value not in (0, 1):
        raise ValueError(f"{what} must be 0 or 1, got {value}")
    return bool(value)


def _text_mapping(what: str, text: str) -> dict[str, str]:
    value = json.loads(text)
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ValueError(f"{what} must be an object of texts")
    return value
