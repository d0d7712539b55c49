"""Damaged databases: whichever byte, sample or cell changes, the file is refused or reads equal."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hdf5_changes import Change, refused, replaced
from store_values import BLOB_SHA256

from ktlib_generator.store import DatabaseError, read_database, verify
from ktlib_generator.store.hdf5_read import decode_database
from ktlib_generator.store.schema import SEAL_BYTES, TABLES, seal

SEED = 20260102


def sealed(body: bytes) -> bytes:
    return seal(body) + body


def test_a_file_changed_by_nothing_but_a_new_seal_still_reads_equal(
    change: Callable[[Change], Path], sound: bytes
) -> None:
    assert read_database(change(lambda file: None)) == decode_database("sound", sound)


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\x89HDF\r\n\x1a\n" + b"\0" * 500, b"\xff" * 5000])
def test_e06_what_is_no_database_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(content)
    refused(path, "no seal")


def test_e06_random_bytes_behind_a_fitting_seal_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    for size in (0, 8, 96, 4096):
        path.write_bytes(sealed(random.Random(SEED).randbytes(size)))
        refused(path, "not readable as HDF5")


def test_e06_a_plain_hdf5_file_is_told_apart_from_damage(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["x"] = 1
    refused(tmp_path / "plain.h5", "no seal", "an HDF5 file")


def test_e06_a_file_cut_anywhere_or_extended_is_refused(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "a.h5"
    size = len(sound)
    lengths = {0, 8, 96, SEAL_BYTES - 1, SEAL_BYTES, SEAL_BYTES + 96, size // 2, size - 1}
    for length in sorted(lengths | set(range(0, size, size // 60))):
        path.write_bytes(sound[:length])
        refused(path)
    path.write_bytes(sound + b"\0")
    refused(path, "truncated or extended")


def test_e06_a_file_cut_anywhere_is_refused_or_equal_behind_a_fitting_seal(sound: bytes) -> None:
    expected = decode_database("sound", sound)
    body = sound[SEAL_BYTES:]
    outcomes = {True: 0, False: 0}
    for length in range(0, len(body), len(body) // 60):
        outcomes[reads_equal_or_refuses(sealed(body[:length]), expected)] += 1
    assert outcomes[False] > 50


def test_e06_one_flipped_byte_anywhere_is_refused_and_found(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "a.h5"
    chosen = random.Random(SEED)
    positions = [*range(0, SEAL_BYTES, 31), *chosen.sample(range(SEAL_BYTES, len(sound)), 120)]
    for position in positions:
        data = bytearray(sound)
        data[position] ^= 1 << chosen.randrange(8)
        path.write_bytes(bytes(data))
        refused(path)


def reads_equal_or_refuses(data: bytes, expected: Any) -> bool:
    """Whether the file was read; it must then be equal to what was written."""
    try:
        found = decode_database("changed", data)
    except DatabaseError:
        return False
    assert found == expected
    return True


def test_e06_one_flipped_byte_behind_a_fitting_seal_never_gives_other_data(sound: bytes) -> None:
    expected = decode_database("sound", sound)
    chosen = random.Random(SEED + 1)
    refusals = 0
    for position in chosen.sample(range(SEAL_BYTES, len(sound)), 300):
        body = bytearray(sound[SEAL_BYTES:])
        body[position - SEAL_BYTES] ^= 1 << chosen.randrange(8)
        refusals += not reads_equal_or_refuses(sealed(bytes(body)), expected)
    assert refusals > 30


def other(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Flip the lowest bit of the last byte that is not padding."""
    data = bytearray(value.tobytes())
    used = len(bytes(data).rstrip(b"\0")) or 1
    data[(used if value.dtype.kind == "S" else 1) - 1] ^= 1
    return np.frombuffer(bytes(data), value.dtype)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("table", "column"),
    [pytest.param(t.name, c.name, id=f"{t.name}-{c.name}") for t in TABLES for c in t.columns],
)
def test_a_changed_value_in_any_column_is_refused_and_its_row_named(
    change: Callable[[Change], Path], table: str, column: str
) -> None:
    def flip(file: h5py.File) -> None:
        rows = file[table][()]
        rows[0][column] = other(rows[0][column])
        file[table][...] = rows

    refused(change(flip), f"{table}[0]: ")


def test_a_changed_sample_names_its_record_and_only_that(change: Callable[[Change], Path]) -> None:
    def flip(file: h5py.File) -> None:
        row = file["records"][()]["measurement_offset"][7]
        file["samples_us"][int(row)] *= 1.001

    findings = verify(change(flip))
    assert len(findings) == 1
    assert "records[7]: fingerprint is" in findings[0]


def test_verify_names_the_damaged_record_behind_a_broken_seal(change: Callable[[Change], Path]) -> None:
    def flip(file: h5py.File) -> None:
        file["samples_us"][0] = 123.0

    path = change(flip)
    path.write_bytes(seal(b"") + path.read_bytes()[SEAL_BYTES:])
    findings = verify(path)
    assert any("bytes after the seal" in finding for finding in findings)
    assert any("records[" in finding for finding in findings)


def test_a_changed_blob_names_the_binary(change: Callable[[Change], Path]) -> None:
    def flip(file: h5py.File) -> None:
        file["blobs"][7] ^= 1

    refused(change(flip), "binaries[0]: blob's sha256 is", BLOB_SHA256)


@pytest.mark.parametrize("value", [0.0, -1.0, 5e-324, np.inf, np.nan])
def test_e28_e29_a_stored_time_that_is_no_time_is_refused(
    change: Callable[[Change], Path], value: float
) -> None:
    def put(file: h5py.File) -> None:
        file["samples_us"][0] = value

    refused(change(put), "finite and positive")


def test_a_record_left_out_or_doubled_is_noticed_by_the_content_name(
    change: Callable[[Change], Path],
) -> None:
    def cut(file: h5py.File) -> None:
        replaced(file, "records", data=file["records"][:-1])

    refused(change(cut), "content_sha256")


def test_changed_meta_is_noticed(change: Callable[[Change], Path]) -> None:
    def put(file: h5py.File) -> None:
        text = file["meta"][()].tobytes().replace(b"2026", b"2027")
        replaced(file, "meta", data=np.frombuffer(text, "u1"))

    refused(change(put), "content_sha256")


@pytest.mark.parametrize(
    ("table", "column", "value", "reason"),
    [
        ("records", "problem", 2**32 - 1, "problem row 4294967295 of"),
        ("records", "variant", 1000, "variant row 1000 of"),
        ("records", "binary", -2, "binary row -2 of"),
        ("records", "binary", 2**31 - 1, "binary row"),
        ("records", "measurement_offset", 2**64 - 1, "measurement: samples"),
        ("records", "measurement_samples", 2**32 - 1, "measurement: samples"),
        ("records", "measurement_method_offset", 2**63, "measurement_method text: bytes"),
        ("records", "log_bytes", 2**32 - 1, "log text: bytes"),
        ("records", "verified", 2, "must be 0 or 1"),
        ("records", "status", b"great", "'great' is not a valid Status"),
        ("records", "status", b"\xff", "ascii"),
        ("binaries", "blob_offset", 2**64 - 1, "blob: bytes"),
        ("binaries", "blob_bytes", 2**64 - 1, "blob: bytes"),
        ("environments", "sm_count", 114, "profile sm90a-114 in a database of sm90a-132"),
        ("problems", "align", 3, "align must be one of"),
        ("problems", "layout", b"zz", "layout 'zz' is unknown"),
        ("variants", "text_bytes", 3, "variant"),
    ],
)
def test_a_row_that_points_outside_or_says_nonsense_is_refused(
    change: Callable[[Change], Path], table: str, column: str, value: Any, reason: str
) -> None:
    def put(file: h5py.File) -> None:
        rows = file[table][()]
        rows[-1][column] = value
        file[table][...] = rows

    refused(change(put), reason)


def test_rows_that_share_samples_or_overlap_texts_cannot_multiply_memory(
    change: Callable[[Change], Path],
) -> None:
    def share(file: h5py.File) -> None:
        rows = file["records"][()]
        timed = rows["measurement_samples"] > 0
        rows["measurement_offset"][timed] = 0
        rows["measurement_samples"][timed] = file["samples_us"].size
        file["records"][...] = rows

    def overlap(file: h5py.File) -> None:
        rows = file["records"][()]
        rows["log_offset"] = np.arange(len(rows))
        rows["log_bytes"] = file["strings"].size - len(rows)
        file["records"][...] = rows

    refused(change(share), "or shared")
    refused(change(overlap), "overlap")
