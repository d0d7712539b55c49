"""Where operands lie in memory: interior views between guard bytes, at the alignment the problem names.

Must not know values or rules; those are inputs.py and verify.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ktlib.problem import ELEMENT_BYTES, MAX_ALIGN_BYTES, Problem
from ktlib_generator.measure.arrays import Arrays

# Large enough that a tile written one row or one tile too far lands inside, not in a neighbour.
GUARD_BYTES = {"cpu": 64 * 1024, "cuda": 1024 * 1024}
ROW_PADDING_BYTES = 64


@dataclass(frozen=True)
class Operand:
    """A matrix as a kernel gets it (`address`, `ld` in elements) and as the product reads it (`logical`)."""

    address: int
    ld: int
    logical: Any


@dataclass(frozen=True)
class Place:
    """A stored matrix's extents, row stride (elements) and distance from an aligned address (bytes)."""

    rows: int
    cols: int
    ld: int
    offset_bytes: int
    transposed: bool

    def span_bytes(self, dtype: str) -> int:
        """Bytes from the first element to past the last."""
        return ((self.rows - 1) * self.ld + self.cols) * ELEMENT_BYTES[dtype]


def place(problem: Problem, operand: str, *, padded: bool = False) -> Place:
    """Say how operand `a`, `b` or `c` is stored so that the call has exactly `problem.align`.

    Contiguous operands keep the alignment their own row stride gives them: C may be odd while A and B
    are not. A lower `align` shifts the address, a higher one rounds the row stride up. `padded` adds
    bytes to each row that change neither.
    """
    size = ELEMENT_BYTES[problem.dtype]
    shapes = {"a": (problem.m, problem.k), "b": (problem.k, problem.n), "c": (problem.m, problem.n)}
    rows, cols = shapes[operand]
    transposed = operand != "c" and problem.layout["ab".index(operand)] == "t"
    if transposed:
        rows, cols = cols, rows
    row_bytes, offset = cols * size, 0
    if problem.align < problem.contiguous_align:
        offset = problem.align
    elif problem.align > problem.contiguous_align:
        row_bytes = -(-row_bytes // problem.align) * problem.align
    if row_bytes % size or offset % size:
        raise ValueError(
            f"problem {problem}: align {problem.align} is below the element size of {size} bytes"
        )
    if padded:
        row_bytes += ROW_PADDING_BYTES
    return Place(rows, cols, row_bytes // size, offset, transposed)


class Guarded:
    """One operand inside a larger buffer whose every other byte has a known value."""

    def __init__(self, problem: Problem, name: str, arrays: Arrays, *, padded: bool) -> None:
        where = place(problem, name, padded=padded)
        guard = GUARD_BYTES[arrays.kind]
        span = where.span_bytes(problem.dtype)
        total = -(-(guard + where.offset_bytes + span + guard) // MAX_ALIGN_BYTES) * MAX_ALIGN_BYTES
        self._arrays = arrays
        self._buffer = arrays.buffer(total)
        start = guard + where.offset_bytes
        self._stored = arrays.matrix(self._buffer, start, where.rows, where.cols, where.ld, problem.dtype)
        logical = self._stored.T if where.transposed else self._stored
        self.operand = Operand(arrays.address(self._buffer) + start, where.ld, logical)

    def fill(self, byte: int) -> None:
        """Set every byte, the operand's and the guards'."""
        self._buffer[...] = byte

    def load(self, values: Any, surround: int) -> None:
        """Set the operand to `values` and everything around it to the byte `surround`."""
        self.fill(surround)
        self._arrays.assign(self.operand.logical, values)

    def holds(self, values: Any) -> bool:
        """Whether the operand is bit for bit `values`."""
        bits = self._arrays.bits
        return bool((bits(self.operand.logical) == bits(values)).all())

    def outside_intact(self, byte: int) -> bool:
        """Whether every byte outside the operand is still `byte`. Overwrites the operand."""
        size = int(self._stored.itemsize)
        word = int.from_bytes(bytes([byte]) * size, "little", signed=self._arrays.signed_bits)
        self._arrays.bits(self._stored)[...] = word
        return bool((self._buffer == byte).all())


@dataclass(frozen=True)
class Arena:
    """Guarded A, B and C of one problem; the same addresses serve every case, with new contents."""

    a: Guarded
    b: Guarded
    c: Guarded

    @classmethod
    def make(cls, problem: Problem, arrays: Arrays, *, padded: bool) -> Arena:
        """Allocate the three operands."""
        a, b, c = (Guarded(problem, name, arrays, padded=padded) for name in "abc")
        return cls(a, b, c)
