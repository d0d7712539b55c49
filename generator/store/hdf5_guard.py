"""Takes the known datasets out of an HDF5 file and refuses everything that could reach outside it.

What is looked at by name is allow-listed; the rest is never opened. Must not know what the rows mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, BinaryIO

from ktlib_generator.store.schema import (
    ARRAYS,
    ATTRIBUTES,
    DATABASE_FORMAT,
    MAX_ATTRIBUTE_BYTES,
    MAX_CHUNK_BYTES,
    MAX_DATASET_BYTES,
    MAX_INFLATION,
    SCHEMA_MINOR,
    TABLES,
    Array,
    DatabaseError,
    Table,
    check_version,
)

# HDF5 filter numbers: deflate and shuffle. Any other may be a plug-in, that is, code.
_FILTERS = (1, 2)


@dataclass(frozen=True)
class Content:
    """The datasets as read: rows by column name for tables, raw content for arrays."""

    profile: str
    content_sha256: str
    schema_minor: int
    tables: dict[str, list[dict[str, Any]]]
    strings: bytes
    samples: Any
    blobs: bytes
    meta: bytes


def read_content(where: str, image: BinaryIO, file_bytes: int) -> Content:
    """Read the known attributes and datasets from a file image; unknown ones are ignored.

    Raises:
        DatabaseError: `where`, then what is missing, unreadable or not allowed.
    """
    import h5py

    try:
        with h5py.File(image, "r") as file:
            attributes = _attributes(where, file)
            minor = attributes["schema_minor"]
            tables = {table.name: _table(where, file, table, minor, file_bytes) for table in TABLES}
            arrays = {array.name: _array(where, file, array, file_bytes) for array in ARRAYS}
    except DatabaseError:
        raise
    except Exception as error:  # h5py raises OSError, RuntimeError, KeyError, TypeError and more on bad files
        raise DatabaseError(
            f"{where}: not readable as HDF5 ({type(error).__name__}: {error}); restore it, or merge the"
            " journals again"
        ) from error
    return Content(
        profile=attributes["profile"],
        content_sha256=attributes["content_sha256"],
        schema_minor=minor,
        tables=tables,
        strings=arrays["strings"].tobytes(),
        samples=arrays["samples_us"],
        blobs=arrays["blobs"].tobytes(),
        meta=arrays["meta"].tobytes(),
    )


def _attributes(where: str, file: Any) -> dict[str, Any]:
    values = {name: _attribute(where, file, "/", name, kind) for name, kind in ATTRIBUTES.items()}
    if values["format"] != DATABASE_FORMAT:
        raise DatabaseError(f"{where}: format {values['format']!r}, expected {DATABASE_FORMAT!r}")
    check_version(where, values["schema_major"])
    return values


def _attribute(where: str, element: Any, element_name: str, name: str, kind: type) -> Any:
    """Read one scalar attribute of fixed-length text or a whole number."""
    import h5py

    if not h5py.h5a.exists(element.id, name.encode("ascii")):
        raise DatabaseError(f"{where}: {element_name} has no attribute {name!r}: not a whole ktlib database")
    attribute = h5py.h5a.open(element.id, name.encode("ascii"))
    stored = attribute.get_type()
    is_text = isinstance(stored, h5py.h5t.TypeStringID) and not stored.is_variable_str()
    is_number = isinstance(stored, h5py.h5t.TypeIntegerID)
    if attribute.shape != () or not (is_text if kind is str else is_number):
        raise DatabaseError(f"{where}: attribute {name!r} of {element_name} is not one {kind.__name__}")
    if attribute.get_storage_size() > MAX_ATTRIBUTE_BYTES:
        raise DatabaseError(f"{where}: attribute {name!r} of {element_name} is too large")
    value = element.attrs[name]
    if kind is int:
        return int(value)
    return bytes(value).decode("utf-8") if isinstance(value, bytes) else str(value)


def _dataset(where: str, file: Any, element: Table | Array, file_bytes: int) -> Any:
    """Open one dataset after checking its link, storage, filters, type and size."""
    import h5py

    name = element.name
    if not file.id.links.exists(name.encode("ascii")):
        raise DatabaseError(f"{where}: dataset {name!r} is missing: not a whole ktlib database")
    # Names have one component, so this one link is the whole path.
    link = file.get(name, getlink=True)
    if type(link) is not h5py.HardLink:
        raise DatabaseError(f"{where}: {name!r} is a {type(link).__name__}; only hard links are read")
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise DatabaseError(f"{where}: {name!r} is a {type(dataset).__name__}, expected a dataset")
    _check_storage(where, dataset, name)
    if dataset.ndim != 1 or dataset.dtype.hasobject:
        raise DatabaseError(
            f"{where}: {name!r} has shape {dataset.shape} and type {dataset.dtype}; expected one dimension,"
            " no variable-length, object or reference type"
        )
    limit = min(MAX_DATASET_BYTES, file_bytes * MAX_INFLATION)
    if dataset.size * dataset.dtype.itemsize > limit:
        raise DatabaseError(
            f"{where}: {name!r} claims {dataset.size} x {dataset.dtype.itemsize} bytes; the limit for a file"
            f" of {file_bytes} bytes is {limit}"
        )
    version = _attribute(where, dataset, repr(name), "encoding_version", int)
    if version != element.encoding_version:
        raise DatabaseError(
            f"{where}: {name!r} has encoding version {version}, this ktlib reads {element.encoding_version};"
            " use a newer ktlib"
        )
    return dataset


def _check_storage(where: str, dataset: Any, name: str) -> None:
    """Refuse storage outside the dataset (external files, virtual datasets) and filters that are code."""
    import h5py

    plist = dataset.id.get_create_plist()
    layout = plist.get_layout()
    if layout not in (h5py.h5d.COMPACT, h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED):
        raise DatabaseError(f"{where}: {name!r} is a virtual dataset, which may read other files; not read")
    if plist.get_external_count():
        raise DatabaseError(f"{where}: {name!r} keeps its data in other files (external storage); not read")
    filters = [plist.get_filter(index)[0] for index in range(plist.get_nfilters())]
    if any(number not in _FILTERS for number in filters):
        raise DatabaseError(f"{where}: {name!r} uses HDF5 filters {filters}; only gzip and shuffle are read")
    if layout == h5py.h5d.CHUNKED:
        chunk_bytes = dataset.dtype.itemsize
        for extent in dataset.chunks:
            chunk_bytes *= extent
        if chunk_bytes > MAX_CHUNK_BYTES:
            raise DatabaseError(f"{where}: {name!r} has {chunk_bytes} bytes a chunk, limit {MAX_CHUNK_BYTES}")


def _table(where: str, file: Any, table: Table, minor: int, file_bytes: int) -> list[dict[str, Any]]:
    """Read a compound dataset; columns newer than the file take their default, unknown ones are ignored."""
    dataset = _dataset(where, file, table, file_bytes)
    have = dict(dataset.dtype.fields or {})
    defaults: dict[str, Any] = {}
    for column in table.columns:
        if column.name not in have and column.since > min(minor, SCHEMA_MINOR):
            defaults[column.name] = column.default
        elif column.name not in have:
            raise DatabaseError(
                f"{where}: {table.name!r} lacks the column {column.name!r} of schema 1.{column.since};"
                " merge the journals again"
            )
        elif have[column.name][0].str != column.type:
            raise DatabaseError(
                f"{where}: column {table.name}.{column.name} has type {have[column.name][0].str},"
                f" expected {column.type}"
            )
    names = [column.name for column in table.columns if column.name not in defaults]
    data = dataset[()]
    columns = [data[name].tolist() for name in names]
    return [{**defaults, **dict(zip(names, row, strict=True))} for row in zip(*columns, strict=True)]


def _array(where: str, file: Any, array: Array, file_bytes: int) -> Any:
    dataset = _dataset(where, file, array, file_bytes)
    if dataset.dtype.str != array.type:
        raise DatabaseError(f"{where}: {array.name!r} has type {dataset.dtype.str}, expected {array.type}")
    return dataset[()]
