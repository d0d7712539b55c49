"""The inputs a candidate is verified on, each with its fp64 reference.

Must not run a candidate or judge it; that is verify.py. Every case is drawn from a seed the parent chose
after the candidate was built.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ktlib.problem import Problem
from ktlib_generator.measure.arrays import Arrays

# Whole-output references up to this many FLOPs and outputs (fp64 costs 3 ms on an H200, 0.1 s on two CPU
# cores); larger problems are compared on sampled rows and columns, and as a whole by `Case.projection`.
FULL_REFERENCE_FLOPS = {"cpu": 4 * 10**9, "cuda": 10**11}
FULL_REFERENCE_OUTPUTS = 2**24
SAMPLED_LINES = 64
# Largest integer below which every integer is a value of the dtype.
EXACT_INTEGERS = {"fp16": 2048, "bf16": 256, "fp32": 2**24}
# Half-sums of the cancelling test reach this: far above 2048, below fp16's 65504.
CANCELLING_SUM = 20000
SMALL_INTEGER = 4


@dataclass(frozen=True)
class Sample:
    """A part of C with its fp64 value: whole rows, whole columns, or everything when both are None.

    `magnitude` is (|A||B|) at the same entries, only where the bound is checked.
    """

    rows: Any
    cols: Any
    reference: Any
    magnitude: Any = None

    def of(self, matrix: Any) -> Any:
        """Pick this sample's entries from a matrix of C's shape."""
        if self.rows is not None:
            return matrix[self.rows]
        return matrix if self.cols is None else matrix[:, self.cols]


@dataclass(frozen=True)
class Case:
    """Operands of one verification run, rounded to the problem's dtype, and what C must be.

    `exact`: C must equal the reference rounded once. `projection`: A (B v) for a random v, with which all
    of C is checked exactly when only part of it is sampled. `special_rows` and `special_cols` may hold
    NaN or Inf in C; every other entry must be finite.
    """

    name: str
    a: Any
    b: Any
    samples: tuple[Sample, ...]
    exact: bool
    projection: tuple[Any, Any] | None = None
    special_rows: tuple[int, ...] = ()
    special_cols: tuple[int, ...] = ()


def cases(problem: Problem, arrays: Arrays, seed: int) -> tuple[Case, ...]:
    """Draw every case that applies to the problem, in the order they are run."""
    makers: list[Callable[[Problem, Arrays, int], Case]] = [zero_one, normal]
    if problem.accumulate == "fp32":
        makers.append(small_integers)
        if cancelling_applies(problem):
            makers.append(cancelling)
        if width_probe_applies(problem):
            makers.append(width_probe)
    makers.append(special)
    return tuple(make(problem, arrays, seed + 1000 * i) for i, make in enumerate(makers))


def zero_one(problem: Problem, arrays: Arrays, seed: int) -> Case:
    """Zeros and ones, so sparse that every sum is a value of the dtype: finds wrong indexing."""
    limit = EXACT_INTEGERS[problem.dtype]
    mean = limit / 2 if limit > 1000 else limit * 0.4  # eight standard deviations of room below the limit
    density = min(0.5, math.sqrt(mean / problem.k))
    steps = 1 << 20
    cut = int(density * steps)

    def bits(rows: int, cols: int, salt: int) -> Any:
        return (arrays.integers(0, steps - 1, rows, cols, seed + salt) < cut) * 1.0

    a, b = bits(problem.m, problem.k, 1), bits(problem.k, problem.n, 2)
    return _case("zero_one", problem, arrays, a, b, seed, exact=True, project=True)


def small_integers(problem: Problem, arrays: Arrays, seed: int) -> Case:
    """Integers in [-4, 4]: fp32 sums are exact in any order, so C is the reference rounded once."""
    a = arrays.integers(-SMALL_INTEGER, SMALL_INTEGER, problem.m, problem.k, seed + 1)
    b = arrays.integers(-SMALL_INTEGER, SMALL_INTEGER, problem.k, problem.n, seed + 2)
    return _case("small_integers", problem, arrays, a, b, seed, exact=True)


def normal(problem: Problem, arrays: Arrays, seed: int) -> Case:
    """Standard normal values, for the RMS rule and the bound."""
    a = arrays.normal(problem.m, problem.k, seed + 1)
    b = arrays.normal(problem.k, problem.n, seed + 2)
    return _case("normal", problem, arrays, a, b, seed, exact=False)


def cancelling_applies(problem: Problem) -> bool:
    """Needs two halves of K, and sums below 2^24 so that fp32 is exact."""
    return problem.accumulate == "fp32" and 2 <= problem.k <= 2**24


def cancelling(problem: Problem, arrays: Arrays, seed: int) -> Case:
    """Integers whose large half-sums cancel: exact in fp32 in any order, wrong nearly everywhere in fp16.

    A = [X, X P] and B = [Y; S - P^T Y] with positive integers X, Y, a permutation P and S with one 1 in
    each column, so C = X P S. Each half alone reaches about 2e4: an fp16 accumulator, or an fp16
    partial of a split reduction, loses its low bits there and they do not come back. An odd K's last
    position is zero. Applies for 2 <= K <= 2^24.
    """
    half = problem.k // 2
    top = max(1, min(200, int(2 * math.sqrt(CANCELLING_SUM / half))))
    x = arrays.integers(1, top, problem.m, half, seed + 1)
    y = arrays.integers(1, top, half, problem.n, seed + 2)
    permutation = arrays.index(np.random.default_rng(seed + 3).permutation(half).tolist())
    columns = np.arange(problem.n).tolist()
    ones = np.random.default_rng(seed + 4).integers(0, half, problem.n).tolist()
    a, b = arrays.zeros(problem.m, problem.k), arrays.zeros(problem.k, problem.n)
    a[:, :half], a[:, half : 2 * half] = x, x[:, permutation]
    b[:half], b[half : 2 * half] = y, -y[permutation]
    b[arrays.index([half + one for one in ones]), arrays.index(columns)] += 1.0
    return _case("cancelling", problem, arrays, a, b, seed, exact=True)


def width_probe_applies(problem: Problem) -> bool:
    """Needs enough halves that the sum rounds away from 2048 in the problem's dtype."""
    halves = (problem.k - 1) // 16
    spacing = 2.0 * 2048 / EXACT_INTEGERS[problem.dtype]
    return problem.accumulate == "fp32" and halves * 0.5 > 0.75 * spacing


def width_probe(problem: Problem, arrays: Arrays, seed: int) -> Case:
    """Rows of A with 2048 once and 0.5 at every other 16th position, B ones: a narrow sum sticks at 2048.

    The 2048 stands first in row 0 and moves through K from row to row, so that each part of a split
    reduction meets one.
    """
    del seed  # nothing is random here
    period = min(problem.m, 64)
    places = (problem.k - 1) // 16 + 1
    pattern = arrays.zeros(period, problem.k)
    pattern[:, ::16] = 0.5
    for row in range(period):
        pattern[row, 16 * (row * 7 % places)] = 2048.0
    a = pattern[arrays.index([row % period for row in range(problem.m)])]
    b = arrays.zeros(problem.k, problem.n) + 1.0
    return _case("width_probe", problem, arrays, a, b, 0, exact=True)


def special(problem: Problem, arrays: Arrays, seed: int) -> Case:
    """Small integers, with rows of NaN, Inf, zero, overflow and subnormals, and a column of Inf.

    They must reach exactly the entries IEEE arithmetic sends them to (0 times Inf is NaN) and no other.
    Subnormals only for fp16: below 2^-126 hardware differs in what it keeps.
    """
    draw = np.random.default_rng(seed)
    a = arrays.integers(-SMALL_INTEGER, SMALL_INTEGER, problem.m, problem.k, seed + 1)
    b = arrays.integers(-SMALL_INTEGER, SMALL_INTEGER, problem.k, problem.n, seed + 2)
    overflow = 16384.0 if problem.dtype == "fp16" else 2.0**126
    kinds: list[tuple[float, bool]] = [(math.nan, False), (math.inf, False), (0.0, True), (overflow, True)]
    if problem.dtype == "fp16":
        kinds.append((2.0**-24, True))
    rows = [int(r) for r in draw.choice(problem.m, min(problem.m, len(kinds)), replace=False)]
    for row, which in zip(rows, draw.permutation(len(kinds)), strict=False):
        value, alone = kinds[int(which)]
        if alone:
            a[row] = 0.0
        a[row, int(draw.integers(problem.k))] = value
    cols: list[int] = []
    if problem.n > 1:
        cols.append(int(draw.integers(problem.n)))
        b[int(draw.integers(problem.k)), cols[0]] = math.inf
    return _case(
        "special", problem, arrays, a, b, seed, exact=True, special_rows=tuple(rows), special_cols=tuple(cols)
    )


def sampled_lines(extent: int, seed: int, always: tuple[int, ...] = ()) -> list[int]:
    """Choose rows or columns to compare: both ends, those asked for, and random ones."""
    draw = np.random.default_rng(seed)
    ends = {0, 1, extent // 2, extent - 2, extent - 1}
    chosen = {line for line in ends | set(always) if 0 <= line < extent}
    chosen |= {int(line) for line in draw.integers(0, extent, SAMPLED_LINES)}
    return sorted(chosen)


def _case(
    name: str,
    problem: Problem,
    arrays: Arrays,
    a: Any,
    b: Any,
    seed: int,
    *,
    exact: bool,
    project: bool = False,
    special_rows: tuple[int, ...] = (),
    special_cols: tuple[int, ...] = (),
) -> Case:
    """Round the operands to the dtype and compute the reference of the rounded operands in fp64."""
    a, b = arrays.encode(a, problem.dtype), arrays.encode(b, problem.dtype)
    # Kept in the order they are stored, so that loading an arena is a straight copy.
    a, b = (arrays.copy(x.T).T if t == "t" else x for x, t in zip((a, b), problem.layout, strict=True))
    wide_a, wide_b = arrays.decode(a, problem.dtype), arrays.decode(b, problem.dtype)

    def sample(rows: Any, cols: Any) -> Sample:
        left = wide_a if rows is None else wide_a[rows]
        right = wide_b if cols is None else wide_b[:, cols]
        with np.errstate(invalid="ignore", over="ignore"):
            reference = left @ right
        magnitude = None if exact else arrays.xp.abs(left) @ arrays.xp.abs(right)
        return Sample(rows, cols, reference, magnitude)

    projection = None
    few = problem.m * problem.n <= FULL_REFERENCE_OUTPUTS
    if few and problem.flops <= FULL_REFERENCE_FLOPS[arrays.kind]:
        samples: tuple[Sample, ...] = (sample(None, None),)
    else:
        rows = arrays.index(sampled_lines(problem.m, seed + 7, special_rows))
        cols = arrays.index(sampled_lines(problem.n, seed + 8, special_cols))
        samples = (sample(rows, None), sample(None, cols))
        if project:
            vector = arrays.integers(1, 2**20, problem.n, 1, seed + 9)
            projection = (vector, wide_a @ (wide_b @ vector))
    return Case(name, a, b, samples, exact, projection, special_rows, special_cols)
