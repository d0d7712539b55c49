"""The warning category, and the sentences for operands that do not go together.

Must not look at an array; names, shapes and dtypes come in as text or tuples.
"""

from __future__ import annotations

from collections.abc import Sequence

ACCEPTED = (
    "two torch tensors, two CuPy arrays or two NumPy arrays of dtype fp16, bf16, fp32 or fp64, both alike"
)


class KtlibWarning(RuntimeWarning):
    """Something is missing or broken, and the vendor's library does the work instead."""


def in_the_name_of(function: str, error: TypeError | ValueError) -> TypeError | ValueError:
    """Return the error below, said by `function` instead of by matmul."""
    return type(error)(f"{function}:{str(error).removeprefix('matmul:')}")


def not_arrays(types: Sequence[str]) -> TypeError:
    """Operands that are no arrays, or not of one library."""
    return TypeError(f"matmul: got {' and '.join(types)}; accepted are {ACCEPTED}")


def bad_dtypes(names: Sequence[str]) -> TypeError:
    """Operands of different dtypes, or of one that is not a floating-point number's."""
    what = "different dtypes" if len(set(names)) > 1 else "dtype"
    return TypeError(
        f"matmul: got {what} {' and '.join(dict.fromkeys(names))}; accepted are {ACCEPTED}. Cast first"
    )


def bad_devices(names: Sequence[str]) -> ValueError:
    """Operands on different devices."""
    return ValueError(f"matmul: the operands are on {' and '.join(names)}; move them to one device")


def bad_shapes(a: Sequence[int], b: Sequence[int], reason: str) -> ValueError:
    """Shapes that have no product."""
    return ValueError(
        f"matmul: shapes {tuple(a)} and {tuple(b)} do not match: {reason}. "
        "Accepted: (..., m, k) @ (..., k, n) with batches that broadcast; one extent is a vector"
    )


def bad_out(reason: str) -> ValueError:
    """An `out` that cannot take the result; it was not touched."""
    return ValueError(
        f"matmul: out {reason}; nothing was written. Pass an array made for the result, or no out"
    )


def bad_out_dtype(got: str, wanted: str) -> TypeError:
    """An `out` of another dtype than the operands."""
    return TypeError(
        f"matmul: out has dtype {got}, the result has {wanted}; nothing was written. Cast the result"
    )
