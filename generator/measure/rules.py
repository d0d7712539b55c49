"""The numeric rules: each takes a case and what a candidate wrote, and returns what is wrong or None.

Must not run anything; verify.py decides when which rule applies.
"""

from __future__ import annotations

import math
from typing import Any

from ktlib.problem import Problem
from ktlib_generator.measure.arrays import Arrays
from ktlib_generator.measure.inputs import Case, Sample

# Unit roundoff of the output, and half its smallest subnormal.
UNIT_ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24}
HALF_SUBNORMAL = {"fp16": 2.0**-25, "bf16": 2.0**-134, "fp32": 2.0**-150}
# Error of an fp32 sum, per 16 products, over (|A||B|). Tensor cores truncate inside: 2^-22, not 2^-24.
ACCUMULATION_UNIT = 2.0**-22
RMS_LIMIT = 1.03
# Below this many outputs the rounding-only RMS is itself a matter of luck.
RMS_MIN_OUTPUTS = 64


def exact(case: Case, sample: Sample, got: Any, problem: Problem, arrays: Arrays) -> str | None:
    """C equals the reference rounded once; NaN where the reference is NaN, and zeros of either sign agree."""
    want = arrays.decode(arrays.encode(sample.reference, problem.dtype), problem.dtype)
    have = arrays.decode(got, problem.dtype)
    wrong = ~((have == want) | (arrays.xp.isnan(have) & arrays.xp.isnan(want)))
    return _report(case, sample, wrong, have, want)


def bound(
    case: Case, sample: Sample, got: Any, problem: Problem, arrays: Arrays, splits: int = 1
) -> str | None:
    """|C - C64| <= u_out |C64| + (K/16 + S + 8) 2^-22 (|A||B|), entry by entry, for S splits of K."""
    xp = arrays.xp
    have = arrays.decode(got, problem.dtype)
    slack = accumulation_slack(problem, splits)
    allowed = UNIT_ROUNDOFF[problem.dtype] * xp.abs(sample.reference) + HALF_SUBNORMAL[problem.dtype]
    allowed = allowed + slack * sample.magnitude
    wrong = ~(xp.abs(have - sample.reference) <= allowed)
    return _report(case, sample, wrong, have, sample.reference)


def accumulation_slack(problem: Problem, splits: int) -> float:
    """Relative error that summing may add, over (|A||B|)."""
    if problem.accumulate == "fp16":
        return float(problem.k) * UNIT_ROUNDOFF["fp16"]
    return (problem.k / 16 + splits + 8) * ACCUMULATION_UNIT


def rms_ratio(sample: Sample, got: Any, problem: Problem, arrays: Arrays) -> float | None:
    """Return RMS(C - C64) over what rounding C64 once would leave; None when outputs are too few to say."""
    rounded = arrays.decode(arrays.encode(sample.reference, problem.dtype), problem.dtype)
    rounding = float(((rounded - sample.reference) ** 2).mean())
    error = float(((arrays.decode(got, problem.dtype) - sample.reference) ** 2).mean())
    if sample.reference.shape[0] * sample.reference.shape[1] < RMS_MIN_OUTPUTS:
        return None
    if rounding == 0.0:
        return 1.0 if error == 0.0 else float("inf")
    return math.sqrt(error / rounding)


def rms_limit(problem: Problem) -> float:
    """Largest `rms_ratio` allowed.

    With fp32 accumulation of halves only the final rounding shows: 1.03. Where the sum is kept in the
    output's own precision each addition rounds a partial sum: half of K roundings of the final one's
    size, in one chain, with half as much again for luck, and more where few outputs are averaged (a right
    8x8x8 product failed 1 in 100 draws without that).
    """
    if problem.dtype == "fp32" or problem.accumulate == "fp16":
        few = 1.0 + 8.0 / math.sqrt(problem.m * problem.n)
        return 1.5 * few * math.sqrt(1.0 + problem.k / 2.0)
    return RMS_LIMIT


def rms(ratio: float | None, problem: Problem) -> str | None:
    """The ratio is within its limit; fp16 accumulation of 64 products already gives 1.6."""
    limit = rms_limit(problem)
    if ratio is None or ratio <= limit:
        return None
    return f"normal: RMS error is {ratio:.3f} of the rounding-only value, at most {limit:.3f} is accepted"


def finite_elsewhere(case: Case, c: Any, problem: Problem, arrays: Arrays) -> str | None:
    """All of C is finite outside the case's special rows and columns: no NaN from beside an operand or C."""
    finite = arrays.xp.isfinite(c) if problem.dtype != "bf16" else arrays.xp.isfinite(_widen(c, arrays))
    for row in case.special_rows:
        finite[row] = True
    for col in case.special_cols:
        finite[:, col] = True
    if bool(finite.all()):
        return None
    count = int((~finite).sum())
    return f"{case.name}: {count} entries are NaN or Inf where none belongs (not written, or read beside)"


def projected(case: Case, c: Any, problem: Problem, arrays: Arrays) -> str | None:
    """All of C, not only the sampled lines: C v equals A (B v), exactly, in blocks of rows."""
    if case.projection is None:
        return None
    vector, want = case.projection
    step = max(1, 2**26 // problem.n)
    for start in range(0, problem.m, step):
        part = arrays.decode(c[start : start + step], problem.dtype) @ vector
        wrong = part != want[start : start + step]
        if bool(wrong.any()):
            row = start + int(wrong.reshape(-1).nonzero()[0].reshape(-1)[0])
            return f"{case.name}: row {row} of C is wrong somewhere (C v differs from A (B v))"
    return None


def _widen(c: Any, arrays: Arrays) -> Any:
    return arrays.decode(c, "bf16") if arrays.xp.__name__ == "numpy" else c


def _report(case: Case, sample: Sample, wrong: Any, have: Any, want: Any) -> str | None:
    """Say how many entries are wrong and show the first, in C's coordinates."""
    if not bool(wrong.any()):
        return None
    flat = int(wrong.reshape(-1).nonzero()[0].reshape(-1)[0])
    i, j = divmod(flat, wrong.shape[1])
    row = i if sample.rows is None else int(sample.rows[i])
    col = j if sample.cols is None else int(sample.cols[j])
    return (
        f"{case.name}: {int(wrong.sum())} of {wrong.shape[0] * wrong.shape[1]} compared entries are wrong, "
        f"first C[{row}, {col}] = {float(have[i, j]):.9g}, expected {float(want[i, j]):.9g}"
    )
