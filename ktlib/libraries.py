"""The array libraries as the Python path sees them: facts about an array, and the library's own product.

Must not import a library: an operand's library is in `sys.modules` already. Must not choose a kernel.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from ktlib import _core

_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
HALF = ("fp16", "bf16")
_MAX_OVERLAP_WORK: Any = 100_000  # steps; strided matrices take a handful


@dataclass(frozen=True)
class Memory:
    """Where an array's elements are; strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def expanded(self) -> bool:
        """Whether several elements share one place."""
        return any(s == 0 and n > 1 for n, s in zip(self.shape, self.strides, strict=True))

    def foldable(self, keep: int) -> bool:
        """Whether all axes but the last `keep` walk memory like one axis."""
        folded = len(self.shape) - keep
        axes = [(n, s) for n, s in zip(self.shape[:folded], self.strides[:folded], strict=True) if n != 1]
        return all(s == n_in * s_in for (_, s), (n_in, s_in) in itertools.pairwise(axes))

    def overlaps(self, other: Memory) -> bool:
        """Whether a byte belongs to both; True also where finding out takes too long."""
        if 0 in self.shape or 0 in other.shape or 0 in (self.address, other.address):
            return False
        import numpy as np

        try:
            return bool(np.shares_memory(_addresses(self), _addresses(other), max_work=_MAX_OVERLAP_WORK))
        except RuntimeError:  # numpy's TooHardError
            return True


class Library(Protocol):
    """What the Python path needs of an array library."""

    name: str

    def shape(self, array: Any) -> tuple[int, ...]: ...

    def dtype(self, array: Any) -> str:
        """`fp16`, `bf16`, `fp32` or `fp64`; the library's own name for every other dtype."""
        ...

    def casts(self, array: Any) -> bool:
        """Whether the library's product brings operands on this device to one dtype itself just now."""
        ...

    def device(self, array: Any) -> str: ...

    def same_device(self, a: Any, b: Any) -> bool: ...

    def contiguous(self, array: Any) -> bool: ...

    def memory(self, array: Any) -> Memory | None:
        """None when the array does not give out its memory (a tracer, a fake or wrapped tensor)."""
        ...

    def writable(self, array: Any) -> bool: ...

    def product(self, a: Any, b: Any, out: Any) -> Any:
        """The library's own matmul, with fp32 accumulation for half precision."""
        ...

    def fill_zero(self, array: Any) -> None: ...


def library_of(array: Any) -> Library | None:
    """Return the library an array belongs to, subclasses included; None for anything else."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, getattr(torch, "Tensor", ())):
        return TORCH
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, getattr(cupy, "ndarray", ())):
        return CUPY
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, getattr(numpy, "ndarray", ())):
        return NUMPY
    return None


class _Torch:
    name = "torch"

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}

    def shape(self, array: Any) -> tuple[int, ...]:
        return tuple(array.shape)

    def dtype(self, array: Any) -> str:
        known = self._names.get(array.dtype)
        if known is None:
            name = str(array.dtype).removeprefix("torch.")
            known = self._names[array.dtype] = _SHORT.get(name, name)
        return known

    def casts(self, array: Any) -> bool:
        import torch

        try:
            return bool(torch.is_autocast_enabled(array.device.type))
        except RuntimeError:  # a kind of device that autocast does not know
            return False

    def device(self, array: Any) -> str:
        return str(array.device)

    def same_device(self, a: Any, b: Any) -> bool:
        return bool(a.device == b.device)

    def contiguous(self, array: Any) -> bool:
        return bool(array.is_contiguous())

    def memory(self, array: Any) -> Memory | None:
        import torch

        if type(array).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return None  # a fake tensor or another wrapper: asking for its address is an error
        try:
            address = array.data_ptr()
            if address == 0:  # a meta tensor, or nothing in it
                return None
            size = array.element_size()
            strides = tuple([size * s for s in array.stride()])
            return Memory(address, tuple(array.shape), strides, size)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return None

    def writable(self, array: Any) -> bool:
        return True

    def product(self, a: Any, b: Any, out: Any) -> Any:
        if a.is_cuda:
            dtype = self.dtype(a)
            if dtype in HALF:
                with self.fp32_reduction(dtype):
                    return self._product(a, b, out)
        return self._product(a, b, out)

    def _product(self, a: Any, b: Any, out: Any) -> Any:
        import torch

        functions = getattr(torch._C, "_VariableFunctions", torch)
        matmul = getattr(functions, "matmul", torch.matmul)  # torch.matmul may have been replaced by ours
        if out is None:
            return matmul(a, b)
        if out.dim() < 3 or out.is_contiguous() or self._differentiates(a, b, out):
            return matmul(a, b, out=out)
        return out.copy_(matmul(a, b))  # torch refuses batches that are permuted or have gaps

    def _differentiates(self, *tensors: Any) -> bool:
        import torch

        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return True
        return bool(torch.autograd.forward_ad._current_level >= 0)

    def fill_zero(self, array: Any) -> None:
        array.zero_()

    @contextmanager
    def fp32_reduction(self, dtype: str) -> Iterator[None]:
        """Keep cuBLAS from reducing `fp16` or `bf16` products in half precision, as the fast path does."""
        _core.enter_fp32_reduction(dtype)
        try:
            yield
        finally:
            _core.leave_fp32_reduction(dtype)


class _NumpyLike:
    """NumPy's attributes, which CuPy shares."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}

    def shape(self, array: Any) -> tuple[int, ...]:
        return tuple(array.shape)

    def dtype(self, array: Any) -> str:
        dtype = array.dtype
        known = self._names.get(dtype)
        if known is None:  # NumPy takes microseconds to spell a name
            name = str(dtype.name) if dtype.isnative else str(dtype)
            if name not in _SHORT:
                return name
            known = self._names[dtype] = _SHORT[name]
        return known

    def casts(self, array: Any) -> bool:
        return False


class _Numpy(_NumpyLike):
    name = "numpy"

    def device(self, array: Any) -> str:
        return "cpu"

    def same_device(self, a: Any, b: Any) -> bool:
        return True

    def contiguous(self, array: Any) -> bool:
        return bool(array.flags.c_contiguous)

    def memory(self, array: Any) -> Memory | None:
        return Memory(array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)

    def writable(self, array: Any) -> bool:
        return bool(array.flags.writeable)

    def product(self, a: Any, b: Any, out: Any) -> Any:
        import numpy as np

        matmul = _numpy_matmul()
        if self.dtype(a) not in HALF:
            return matmul(a, b) if out is None else matmul(a, b, out=out)
        # NumPy's own half-precision product accumulates in half precision.
        wide = matmul(a.astype(np.float32), b.astype(np.float32))
        with np.errstate(over="ignore"):  # beyond the half-precision range is infinity, as on a GPU
            if out is None:
                return wide.astype(a.dtype)
            out[...] = wide
        return out

    def fill_zero(self, array: Any) -> None:
        array[...] = 0


def _numpy_matmul() -> Any:
    """NumPy's ufunc; `numpy.matmul` may have been replaced by ours."""
    for name in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):
        found = getattr(sys.modules.get(name), "matmul", None)
        if found is not None:
            return found
    import numpy as np

    return np.matmul


class _Cupy(_NumpyLike):
    name = "cupy"

    def device(self, array: Any) -> str:
        return f"cuda:{int(array.data.device_id)}"

    def same_device(self, a: Any, b: Any) -> bool:
        return bool(a.data.device_id == b.data.device_id)

    def contiguous(self, array: Any) -> bool:
        return bool(array.flags.c_contiguous)

    def memory(self, array: Any) -> Memory | None:
        size = int(array.dtype.itemsize)
        return Memory(int(array.data.ptr), tuple(array.shape), tuple(array.strides), size)

    def writable(self, array: Any) -> bool:
        return True

    def product(self, a: Any, b: Any, out: Any) -> Any:
        import cupy

        return cupy.matmul(a, b) if out is None else cupy.matmul(a, b, out=out)

    def fill_zero(self, array: Any) -> None:
        array.fill(0)


TORCH = _Torch()
NUMPY = _Numpy()
CUPY = _Cupy()


class _Address:
    """Stands for memory that is compared but never read."""

    def __init__(self, memory: Memory) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (memory.address, True),
            "shape": memory.shape,
            "strides": memory.strides,
            "typestr": f"|V{memory.itemsize}",
        }


def _addresses(memory: Memory) -> Any:
    import numpy as np

    return np.asarray(_Address(memory))


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape two batch shapes broadcast to; None when they do not."""
    if a == b or not b:
        return a
    if not a:
        return b
    width = max(len(a), len(b))
    pairs = zip((1,) * (width - len(a)) + a, (1,) * (width - len(b)) + b, strict=True)
    merged = []
    for x, y in pairs:
        if x != y and 1 not in (x, y):
            return None
        merged.append(y if x == 1 else x)
    return tuple(merged)


def element_count(shape: tuple[int, ...]) -> int:
    """Return the product of the extents; 1 for no extents."""
    return math.prod(shape)
