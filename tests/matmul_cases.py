"""For the matmul tests: a database under which most small CPU products run on a kernel, and references."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from pack_cases import make_pack, record

import ktlib
from ktlib import _core
from ktlib.errors import KtlibWarning
from ktlib.problem import ELEMENT_BYTES, LAYOUTS
from ktlib_generator.families.base import Device

ARCH = _core.cpu_archs()[0]
CPU = Device(kind="cpu", name="test", arch=ARCH, sm_count=2)
# A tuned problem serves extents up to twice and down to half of its own, so these cover 1..128.
EXTENTS = (1, 4, 16, 64)


@contextmanager
def only_packs(*paths: str) -> Iterator[None]:
    """Use these packs and no others, shipped ones included; none at all afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KtlibWarning)
        ktlib.databases()  # so that the first product does not load the shipped ones over these
    _core.set_packs(list(paths))
    try:
        yield
    finally:
        _core.set_packs([])


def write_cpu_pack(path: Path) -> str:
    """A pack whose kernels won every problem of the grid, in every layout, dtype and alignment."""
    kernels = {kernel["dtype"]: kernel for kernel in _core.cpu_kernels()}
    records = []
    for dtype, size in ELEMENT_BYTES.items():
        config = {name: kernels[dtype][name] for name in ("tile_m", "tile_n", "unroll", "loop")}
        for m, n, k in itertools.product(EXTENTS, repeat=3):
            for layout in LAYOUTS:
                for align in (align for align in (2, 4, 8, 16) if align >= size):
                    problem = f"{m}x{n}x{k}:{layout}:{dtype}:align={align}"
                    records.append(record(problem, device=CPU, us=1.0, vendor_us=9.0, **config))
    return make_pack(path, records, CPU)


def draw(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Small integers, so that every product of these tests is exact in half precision."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def exact(a: Any, b: Any) -> Any:
    """The product in fp64."""
    return np.matmul(np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64))
