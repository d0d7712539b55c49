"""A database as JSON lines and back, without loss: for reading by eye, for other tools, for old schemas.

Lines: a header, one for each record, one for each binary (base64), an end with the content's sha256.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from typing import Any, BinaryIO, TextIO

from ktlib.canonical import canonical_json
from ktlib_generator.store.hdf5 import write_database
from ktlib_generator.store.hdf5_read import read_database
from ktlib_generator.store.schema import DatabaseError, content_sha256
from ktlib_generator.values import Record

EXPORT_FORMAT = "ktlib-tuning-export"
EXPORT_VERSION = 1
MAX_LINE_BYTES = 64 << 20


def export_json(path: str | os.PathLike[str], stream: TextIO) -> None:
    """Write the whole database at `path` to `stream`; `import_json` of that gives an equal database.

    Raises:
        DatabaseError: the database cannot be read, or holds a value too long to be imported again.
    """
    database = read_database(path)
    header = {
        "format": EXPORT_FORMAT,
        "version": EXPORT_VERSION,
        "profile": database.profile,
        "meta": database.meta,
    }
    _write(stream, header)
    for record in database.records:
        _write(stream, {"record": record.to_dict()})
    for sha256, data in sorted(database.binaries.items()):
        _write(stream, {"binary": sha256, "base64": base64.b64encode(data).decode("ascii")})
    _write(stream, {"end": len(database.records), "content_sha256": database.content_sha256})


def import_json(stream: BinaryIO, path: str | os.PathLike[str], *, name: str = "import") -> None:
    """Write the database that `stream` describes to `path`; `name` stands for the stream in messages.

    Nothing is written unless the stream is whole and its content has the sha256 that its end states. No
    line is held beyond the limit, so a stream that is no export is refused before it fills memory.

    Raises:
        StoreError: naming the line that is wrong, or the path that cannot be written.
    """
    records: list[Record] = []
    binaries: dict[str, bytes] = {}
    header: dict[str, Any] = {}
    end: dict[str, Any] = {}
    for number, line in enumerate(_lines(stream, name), start=1):
        try:
            data = json.loads(line)
            if not isinstance(data, dict):
                raise ValueError("expected a JSON object")
            if end:
                raise ValueError("a line after the end")
            if not header:
                header = _header(data)
            elif set(data) == {"record"}:
                records.append(Record.from_dict(data["record"]))
            elif set(data) == {"binary", "base64"}:
                binaries[data["binary"]] = base64.b64decode(data["base64"], validate=True)
            elif set(data) == {"end", "content_sha256"}:
                end = data
            else:
                raise ValueError(f"unknown line with the fields {sorted(data)}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DatabaseError(
                f"{name}:{number}: {error}; a file to import must come from `ktlib-build export`; nothing was"
                " imported"
            ) from error
    if not end:
        raise DatabaseError(f"{name}: the end line is missing: cut off; export again")
    found = content_sha256(
        header["profile"], [record.fingerprint() for record in records], list(binaries), header["meta"]
    )
    if found != end["content_sha256"] or len(records) != end["end"]:
        raise DatabaseError(
            f"{name}: content is {found} with {len(records)} records, its end states {end['content_sha256']}"
            f" with {end['end']}: changed or incomplete; export again"
        )
    write_database(path, records, binaries, header["meta"])


def _header(data: dict[str, Any]) -> dict[str, Any]:
    if data.get("format") != EXPORT_FORMAT or data.get("version") != EXPORT_VERSION:
        raise ValueError(
            f"format {data.get('format')!r} version {data.get('version')!r};"
            f" expected {EXPORT_FORMAT!r} version {EXPORT_VERSION}"
        )
    if type(data["profile"]) is not str or not isinstance(data["meta"], dict):
        raise ValueError("profile must be text and meta an object")
    return data


def _lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise DatabaseError(
                f"{name}:{number}: longer than {MAX_LINE_BYTES} bytes; a file to import must come from"
                " `ktlib-build export`; nothing was imported"
            )
        yield line


def _write(stream: TextIO, value: dict[str, Any]) -> None:
    line = canonical_json(value) + "\n"  # ASCII, so characters are bytes
    if len(line) > MAX_LINE_BYTES:
        raise DatabaseError(
            f"a line of {len(line)} bytes, import takes at most {MAX_LINE_BYTES}; copy the .h5 instead"
        )
    stream.write(line)
