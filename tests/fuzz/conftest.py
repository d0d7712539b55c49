"""The database that the fuzz tests change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import pytest
from hdf5_changes import Change
from store_values import reseal, write_sample


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_sample(tmp_path_factory.mktemp("sound") / "a.h5").read_bytes()


@pytest.fixture
def change(tmp_path: Path, sound: bytes) -> Callable[[Change], Path]:
    """Apply a change through h5py to a copy of the sound file, and give the copy a fitting seal."""

    def apply(how: Change) -> Path:
        path = tmp_path / "changed.h5"
        path.write_bytes(sound)
        with h5py.File(path, "r+") as file:
            how(file)
        return reseal(path)

    return apply
