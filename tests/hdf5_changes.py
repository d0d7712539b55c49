"""Changes to a database made through h5py, as damage or an attacker would make them, and what must follow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest

from ktlib_generator.store import DatabaseError, read_database, verify

Change = Callable[[h5py.File], None]


def replaced(file: h5py.File, name: str, **how: Any) -> h5py.Dataset:
    """Put another dataset in the place of one, with its encoding attributes."""
    attributes = dict(file[name].attrs)
    del file[name]
    dataset = file.create_dataset(name, **how)
    dataset.attrs.update(attributes)
    return dataset


def refused(path: Path, *reasons: str) -> None:
    with pytest.raises(DatabaseError) as raised:
        read_database(path)
    assert str(raised.value).startswith(str(path))
    for reason in reasons:
        assert reason in str(raised.value)
    assert verify(path), "verify must find what read_database refuses"
