"""Hostile and foreign databases: links, storage, filters, types, shapes and versions not the schema's.

Every file has a seal that fits, so that what refuses it is the check behind the seal.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hdf5_changes import Change, refused, replaced
from store_values import sample_records

from ktlib_generator.store import hdf5_guard, read_database, verify
from ktlib_generator.store.hdf5 import encode_database
from ktlib_generator.store.hdf5_read import decode_database
from ktlib_generator.store.schema import ARRAYS, ATTRIBUTES, RECORDS, TABLES, Column, Table

NAMES = tuple(element.name for element in (*TABLES, *ARRAYS))


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_dataset_is_named(change: Callable[[Change], Path], name: str) -> None:
    def remove(file: h5py.File) -> None:
        del file[name]

    refused(change(remove), f"dataset {name!r} is missing")


@pytest.mark.parametrize("name", NAMES)
def test_a_link_in_place_of_a_dataset_is_not_followed(
    tmp_path: Path, change: Callable[[Change], Path], sound: bytes, name: str
) -> None:
    (tmp_path / "other.h5").write_bytes(sound)

    def soft(file: h5py.File) -> None:
        file.move(name, "hidden")
        file[name] = h5py.SoftLink("/hidden")

    def external(file: h5py.File) -> None:
        del file[name]
        file[name] = h5py.ExternalLink(str(tmp_path / "other.h5"), f"/{name}")

    def group(file: h5py.File) -> None:
        del file[name]
        file.create_group(name)

    refused(change(soft), "is a SoftLink; only hard links are read")
    refused(change(external), "is a ExternalLink; only hard links are read")
    refused(change(group), "expected a dataset")


def test_storage_in_another_file_is_not_read(tmp_path: Path, change: Callable[[Change], Path]) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"host file" * 100)

    def external(file: h5py.File) -> None:
        replaced(file, "blobs", shape=(64,), dtype="u1", external=[(str(secret), 0, 64)])

    def virtual(file: h5py.File) -> None:
        layout = h5py.VirtualLayout(shape=(64,), dtype="u1")
        layout[:] = h5py.VirtualSource(str(secret), "x", shape=(64,))
        attributes = dict(file["blobs"].attrs)
        del file["blobs"]
        file.create_virtual_dataset("blobs", layout).attrs.update(attributes)

    refused(change(external), "external storage")
    refused(change(virtual), "virtual dataset")


@pytest.mark.parametrize(
    "how",
    [
        {"compression": "lzf"},
        {"fletcher32": True},
        {"scaleoffset": 0},
        {"compression": "gzip", "fletcher32": True},
    ],
    ids=str,
)
def test_filters_other_than_gzip_and_shuffle_are_not_run(
    change: Callable[[Change], Path], how: dict[str, Any]
) -> None:
    def put(file: h5py.File) -> None:
        replaced(file, "strings", data=file["strings"][()], chunks=True, **how)

    refused(change(put), "only gzip and shuffle are read")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"shape": (2**40,), "dtype": "u1"}, "claims"),
        ({"shape": (2**40,), "dtype": "u1", "chunks": (1024,), "compression": "gzip"}, "claims"),
        ({"shape": (2**30 + 1,), "dtype": "u1", "chunks": (1024,)}, "claims"),
        ({"shape": (2**24,), "dtype": "u1", "chunks": (2**30,), "maxshape": (None,)}, "a chunk"),
        ({"shape": (4, 4), "dtype": "u1"}, "one dimension"),
        ({"shape": (), "dtype": "u1"}, "one dimension"),
        ({"shape": (4,), "dtype": h5py.string_dtype()}, "variable-length"),
        ({"shape": (4,), "dtype": h5py.vlen_dtype("u1")}, "variable-length"),
        ({"shape": (4,), "dtype": h5py.ref_dtype}, "reference"),
        ({"shape": (4,), "dtype": h5py.regionref_dtype}, "reference"),
        ({"shape": (4,), "dtype": "<u2"}, "has type <u2, expected |u1"),
        ({"shape": (4,), "dtype": "S4"}, "has type |S4, expected |u1"),
        ({"shape": (4,), "dtype": [("a", h5py.string_dtype())]}, "variable-length"),
        ({"data": h5py.Empty("u1")}, ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_shape_or_type_that_is_not_the_schemas_is_refused_before_memory_is_taken(
    change: Callable[[Change], Path], how: dict[str, Any], reason: str
) -> None:
    refused(change(lambda file: replaced(file, "strings", **how) and None), reason)


def test_a_table_with_a_column_of_another_type_is_refused(change: Callable[[Change], Path]) -> None:
    def widen(file: h5py.File) -> None:
        rows = file["problems"][()]
        kind = [(name, "<u8" if name == "m" else rows.dtype[name]) for name in rows.dtype.names]
        replaced(file, "problems", data=rows.astype(kind))

    def plain(file: h5py.File) -> None:
        replaced(file, "problems", data=np.zeros(3, "u4"))

    refused(change(widen), "column problems.m has type <u8, expected <u4")
    refused(change(plain), "lacks the column 'm'")


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_e23_a_root_attribute_that_is_missing_or_of_another_kind_is_not_trusted(
    change: Callable[[Change], Path], name: str
) -> None:
    def remove(file: h5py.File) -> None:
        del file.attrs[name]

    def variable(file: h5py.File) -> None:
        file.attrs[name] = "variable-length text"

    def array(file: h5py.File) -> None:
        file.attrs[name] = np.zeros(4, "u4")

    def large(file: h5py.File) -> None:
        file.attrs[name] = np.bytes_(b"x" * 60000)

    refused(change(remove), f"/ has no attribute {name!r}")
    for how in (variable, array):
        refused(change(how), f"attribute {name!r} of / is not one")
    refused(change(large))


def test_e23_an_environment_without_a_driver_version_and_an_unknown_attribute_are_no_obstacle(
    change: Callable[[Change], Path], sound: bytes
) -> None:
    def add(file: h5py.File) -> None:
        file.attrs["a_validator_of_tomorrow"] = 7
        file["records"].attrs["unit"] = "us"

    assert read_database(change(add)) == decode_database("sound", sound)


def test_e22_a_newer_minor_version_is_read_without_what_it_added(
    change: Callable[[Change], Path], tmp_path: Path, sound: bytes
) -> None:
    def grow(file: h5py.File) -> None:
        file.attrs["schema_minor"] = np.uint32(7)
        file["model"] = np.arange(10)
        file["texts"] = "variable-length"
        file["elsewhere"] = h5py.ExternalLink(str(tmp_path / "none.h5"), "/x")
        file["dangling"] = h5py.SoftLink("/none")
        rows = file["records"][()]
        grown = np.zeros(len(rows), [*[(n, rows.dtype[n]) for n in rows.dtype.names], ("clock_mhz", "<f4")])
        for name in rows.dtype.names:
            grown[name] = rows[name]
        replaced(file, "records", data=grown)

    path = change(grow)
    assert read_database(path) == decode_database("sound", sound)
    assert verify(path) == []


def test_e22_another_major_version_is_refused_in_the_seal_and_behind_it(
    change: Callable[[Change], Path], tmp_path: Path, sound: bytes
) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(sound.replace(b"ktlib-tuning-database 1.0", b"ktlib-tuning-database 2.0", 1))
    refused(path, "schema 2.x, this ktlib reads schema 1.x")
    refused(change(lambda file: file.attrs.modify("schema_major", np.uint32(2))), "schema 2.x")


def test_another_encoding_version_of_one_dataset_is_refused(change: Callable[[Change], Path]) -> None:
    def put(file: h5py.File) -> None:
        file["samples_us"].attrs.modify("encoding_version", np.uint32(2))

    refused(change(put), "'samples_us' has encoding version 2, this ktlib reads 1")


def test_e20_a_column_missing_from_its_own_version_is_refused_by_name(
    change: Callable[[Change], Path],
) -> None:
    def drop(file: h5py.File) -> None:
        rows = file["records"][()]
        names = [name for name in rows.dtype.names if name != "measured_unix"]
        kept = np.zeros(len(rows), [(name, rows.dtype[name]) for name in names])
        for name in names:
            kept[name] = rows[name]
        replaced(file, "records", data=kept)

    refused(change(drop), "'records' lacks the column 'measured_unix' of schema 1.0")


def test_e20_a_column_newer_than_the_file_takes_its_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sound: bytes
) -> None:
    newer = Table("records", (*RECORDS.columns, Column("clock_mhz", "<f4", since=1, default=-1.0)))
    monkeypatch.setattr(hdf5_guard, "TABLES", (*TABLES[:-1], newer))
    monkeypatch.setattr(hdf5_guard, "SCHEMA_MINOR", 1)
    path = tmp_path / "old.h5"
    path.write_bytes(sound)
    with path.open("rb") as file:
        content = hdf5_guard.read_content("old", file, len(sound))
    assert {row["clock_mhz"] for row in content.tables["records"]} == {-1.0}
    assert set(read_database(path).records) == set(sample_records())


def test_e24_a_database_with_tables_but_no_rows_reads_as_empty_and_verify_says_so(tmp_path: Path) -> None:
    path = tmp_path / "empty.h5"
    path.write_bytes(encode_database("empty", "sm90a-132", {}, {}, {}))
    assert read_database(path).records == ()
    assert verify(path) == [f"{path}: holds no records"]


def test_a_file_over_the_size_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.h5"
    with path.open("wb") as file:
        file.truncate(2 << 30)
    refused(path, "the limit is 1073741824")
