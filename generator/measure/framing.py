"""Messages over a pipe: a length-prefixed JSON object and a blob; nothing a candidate prints mixes in.

Must not know what the messages mean.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any

from ktlib.canonical import canonical_json

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"KTMF"
MAX_JSON_BYTES = 64 * 2**20
MAX_BLOB_BYTES = 2**31


class ClosedPipe(EOFError):
    """The other side is gone."""


def pack(message: Mapping[str, Any], blob: bytes = b"") -> bytes:
    """Return one message as bytes."""
    text = canonical_json(dict(message)).encode("ascii")
    return _HEADER.pack(_MAGIC, len(text), len(blob)) + text + blob


class Unpacker:
    """Collects bytes as they come and gives back whole messages, none larger than allowed."""

    def __init__(self, max_json_bytes: int = MAX_JSON_BYTES, max_blob_bytes: int = MAX_BLOB_BYTES) -> None:
        self._data = bytearray()
        self._max_json_bytes, self._max_blob_bytes = max_json_bytes, max_blob_bytes

    def feed(self, data: bytes) -> None:
        """Add bytes read from the pipe."""
        self._data += data

    def next(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the next whole message, or None when more bytes are needed.

        Raises:
            ValueError: the bytes are not a message; the stream is of no use from here on.
        """
        if len(self._data) < _HEADER.size:
            return None
        magic, json_bytes, blob_bytes = _HEADER.unpack_from(self._data)
        if magic != _MAGIC or json_bytes > self._max_json_bytes or blob_bytes > self._max_blob_bytes:
            raise ValueError(f"framing: not a message header: {bytes(self._data[: _HEADER.size])!r}")
        end = _HEADER.size + json_bytes + blob_bytes
        if len(self._data) < end:
            return None
        text = bytes(self._data[_HEADER.size : _HEADER.size + json_bytes])
        blob = bytes(self._data[_HEADER.size + json_bytes : end])
        del self._data[:end]
        try:
            message = json.loads(text)
        except RecursionError:
            raise ValueError("framing: the message is nested too deeply") from None
        if not isinstance(message, dict):
            raise ValueError(f"framing: expected a JSON object, got {text[:80]!r}")
        return message, blob


def receive(descriptor: int, unpacker: Unpacker) -> tuple[dict[str, Any], bytes]:
    """Block until a whole message is there.

    Raises:
        ClosedPipe: the other side closed the pipe first.
    """
    while True:
        message = unpacker.next()
        if message is not None:
            return message
        data = os.read(descriptor, 1 << 20)
        if not data:
            raise ClosedPipe("framing: the pipe was closed")
        unpacker.feed(data)


def send(descriptor: int, message: Mapping[str, Any], blob: bytes = b"") -> None:
    """Write one message, all of it.

    Raises:
        ClosedPipe: the other side closed the pipe.
    """
    data = memoryview(pack(message, blob))
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BrokenPipeError:
            raise ClosedPipe("framing: the pipe was closed") from None
