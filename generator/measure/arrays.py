"""One small array interface over NumPy (CPU) and torch (CUDA), so that verification is written once.

Must not know a rule or a kernel. Arrays are typed `Any`: they are whichever library's. bf16 in NumPy is
uint16 bit patterns.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ktlib.problem import ELEMENT_BYTES
from ktlib_generator.families.base import Device


class Arrays(Protocol):
    """What verification and timing need of an array library.

    `xp` is the library itself, used for names both spell alike (abs, isnan, where, sqrt, ones_like).
    """

    xp: Any
    kind: str
    signed_bits: bool

    def buffer(self, count: int) -> Any:
        """Allocate `count` bytes, aligned to at least 256, contents undefined."""

    def address(self, array: Any) -> int:
        """Return the address of an array's first element."""

    def matrix(self, buffer: Any, offset_bytes: int, rows: int, cols: int, ld: int, dtype: str) -> Any:
        """View part of a buffer as a row-major matrix of `dtype`, rows `ld` elements apart."""

    def assign(self, view: Any, values: Any) -> None:
        """Copy `values` (same dtype and shape) into a view."""

    def bits(self, array: Any) -> Any:
        """View elements as integers of the same size, so that comparison is bitwise."""

    def encode(self, values: Any, dtype: str) -> Any:
        """Round float64 or float32 values once, to nearest even, to a contiguous `dtype` array."""

    def decode(self, array: Any, dtype: str) -> Any:
        """Widen a `dtype` array to float64, exactly."""

    def normal(self, rows: int, cols: int, seed: int) -> Any:
        """Draw standard normal float32 values."""

    def integers(self, low: int, high: int, rows: int, cols: int, seed: int) -> Any:
        """Draw float64 values that are integers in [low, high]."""

    def index(self, positions: Sequence[int]) -> Any:
        """Return positions as an array to index rows or columns with."""

    def zeros(self, rows: int, cols: int) -> Any:
        """Return a float64 matrix of zeros."""

    def copy(self, array: Any) -> Any:
        """Return a contiguous copy."""

    def stream(self) -> int:
        """Return the current stream as an integer (0 on a CPU)."""

    def synchronize(self) -> None:
        """Wait for all work on the device; raises what the device reports."""


class NumpyArrays:
    """`Arrays` over NumPy."""

    xp: Any = np
    kind = "cpu"
    signed_bits = False

    def buffer(self, count: int) -> Any:
        raw = np.empty(count + 256, np.uint8)
        skip = -raw.ctypes.data % 256
        return raw[skip : skip + count]

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def matrix(self, buffer: Any, offset_bytes: int, rows: int, cols: int, ld: int, dtype: str) -> Any:
        kind = numpy_dtype(dtype)
        size = ELEMENT_BYTES[dtype]
        return np.ndarray((rows, cols), kind, buffer, offset_bytes, (ld * size, size))

    def assign(self, view: Any, values: Any) -> None:
        view[...] = values

    def bits(self, array: Any) -> Any:
        return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.itemsize])

    def encode(self, values: Any, dtype: str) -> Any:
        with np.errstate(over="ignore", invalid="ignore"):
            if dtype == "bf16":
                return _float_to_bf16(np.ascontiguousarray(values, np.float32))
            return np.ascontiguousarray(values).astype(numpy_dtype(dtype))

    def decode(self, array: Any, dtype: str) -> Any:
        if dtype == "bf16":
            return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return array.astype(np.float64)

    def normal(self, rows: int, cols: int, seed: int) -> Any:
        return np.random.default_rng(seed).standard_normal((rows, cols), np.float32)

    def integers(self, low: int, high: int, rows: int, cols: int, seed: int) -> Any:
        drawn = np.random.default_rng(seed).integers(low, high, (rows, cols), np.int32, endpoint=True)
        return drawn.astype(np.float64)

    def index(self, positions: Sequence[int]) -> Any:
        return np.asarray(positions, np.int64)

    def zeros(self, rows: int, cols: int) -> Any:
        return np.zeros((rows, cols))

    def copy(self, array: Any) -> Any:
        return np.array(array, order="C")

    def stream(self) -> int:
        return 0

    def synchronize(self) -> None:
        """Nothing to wait for: CPU kernels return when done (threads left behind are looked for)."""


class TorchArrays:
    """`Arrays` over torch. `device` is `cuda:0` on a GPU machine and `cpu` in tests of this class."""

    signed_bits = True

    def __init__(self, device: str = "cuda:0") -> None:
        self.xp: Any = torch_module()
        self.device = device
        self.kind = "cuda" if device.startswith("cuda") else "cpu"
        self._dtypes = {"fp16": self.xp.float16, "bf16": self.xp.bfloat16, "fp32": self.xp.float32}

    def buffer(self, count: int) -> Any:
        raw = self.xp.empty(count + 256, dtype=self.xp.uint8, device=self.device)
        skip = -int(raw.data_ptr()) % 256
        return raw[skip : skip + count]

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def matrix(self, buffer: Any, offset_bytes: int, rows: int, cols: int, ld: int, dtype: str) -> Any:
        size = ELEMENT_BYTES[dtype]
        need = ((rows - 1) * ld + cols) * size
        flat = buffer[offset_bytes : offset_bytes + need].view(self._dtypes[dtype])
        return flat.as_strided((rows, cols), (ld, 1))

    def assign(self, view: Any, values: Any) -> None:
        view.copy_(values)

    def bits(self, array: Any) -> Any:
        torch = self.xp
        return array.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[array.element_size()])

    def encode(self, values: Any, dtype: str) -> Any:
        return values.to(self._dtypes[dtype]).contiguous()

    def decode(self, array: Any, dtype: str) -> Any:
        return array.to(self.xp.float64)

    def normal(self, rows: int, cols: int, seed: int) -> Any:
        return self.xp.randn(rows, cols, generator=self._generator(seed), device=self.device)

    def integers(self, low: int, high: int, rows: int, cols: int, seed: int) -> Any:
        torch = self.xp
        generator = self._generator(seed)
        return torch.randint(
            low, high + 1, (rows, cols), generator=generator, device=self.device, dtype=torch.int32
        ).to(torch.float64)

    def index(self, positions: Sequence[int]) -> Any:
        return self.xp.tensor(list(positions), dtype=self.xp.int64, device=self.device)

    def zeros(self, rows: int, cols: int) -> Any:
        return self.xp.zeros(rows, cols, dtype=self.xp.float64, device=self.device)

    def copy(self, array: Any) -> Any:
        return array.contiguous().clone()

    def stream(self) -> int:
        return int(self.xp.cuda.current_stream().cuda_stream) if self.kind == "cuda" else 0

    def synchronize(self) -> None:
        if self.kind == "cuda":
            self.xp.cuda.synchronize()

    def _generator(self, seed: int) -> Any:
        generator = self.xp.Generator(device=self.device)
        generator.manual_seed(seed % 2**63)
        return generator


def torch_module() -> Any:
    """Import torch (typed loosely: it is optional, and only GPU machines must have it).

    Raises:
        ImportError: torch is not installed.
    """
    return importlib.import_module("torch")


def arrays_for(device: Device) -> Arrays:
    """Return the arrays a device is measured with."""
    return TorchArrays() if device.kind == "cuda" else NumpyArrays()


def numpy_dtype(dtype: str) -> Any:
    """Return the NumPy storage type of a dtype name; bf16 is stored as uint16."""
    return {"fp16": np.float16, "bf16": np.uint16, "fp32": np.float32}[dtype]


def _float_to_bf16(values: Any) -> Any:
    """Round float32 to bf16 bit patterns, nearest even; NaN stays NaN."""
    word = values.view(np.uint32)
    rounded = (word + (((word >> 16) & 1) + 0x7FFF)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
