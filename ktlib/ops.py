"""The Python path of a product: what `_core.matmul` hands over, as torch.matmul means it; and `explain`.

Must not choose a kernel: what can be one plain product is given back to `_core`, the rest to the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ktlib import _core, errors, packs
from ktlib.libraries import Library, broadcast, element_count, library_of
from ktlib.problem import Choice

# Reasons after which both operands are known to be plain matrices that go together, and `out` to fit.
_PLAIN = frozenset(_core.PLAIN_REASONS)
_NOT_MATRICES = _core.NOT_MATRICES
# What is recorded then is torch.matmul alone, without the questions that the checks ask.
_SEEN_BY_TORCH = frozenset(_core.SEEN_BY_TORCH)
_DTYPES = ("fp16", "bf16", "fp32", "fp64")


def fallback(a: Any, b: Any, out: Any, reason: str) -> Any:
    """Compute what the extension did not; `reason` says why it did not.

    Raises:
        TypeError: operands, or `out`, of the wrong kind.
        ValueError: shapes, devices or memory that do not go together.
    """
    if reason in _PLAIN:
        return _known(a).product(a, b, out)
    if reason in _SEEN_BY_TORCH and (out is None or library_of(out) is _known(a)):
        return _known(a).product(a, b, out)
    library, shape = _check(a, b, out)
    if out is not None and a.shape[-1] == 0:
        library.fill_zero(out)
        return out
    if reason == _NOT_MATRICES:
        folded = _fold(library, a, b, out, shape)
        if folded is not None:
            result = _core.matmul(folded.a, folded.b, out=folded.out)
            return result.reshape(shape) if out is None else out
    return library.product(a, b, out)


def explain(a: Any, b: Any, out: Any = None) -> Choice:
    """Say which kernel `matmul(a, b, out=out)` would run, and why; launches nothing.

    Uses the selection of a real call. Operands that have no product raise as the call would.

    Raises:
        TypeError: operands, or `out`, of the wrong kind.
        ValueError: shapes, devices or memory that do not go together.
    """
    packs.ensure_loaded()
    reason, data = _core.explain_call(a, b, out)
    if reason:
        try:
            library, shape = _check(a, b, out)
        except (TypeError, ValueError) as error:
            raise errors.in_the_name_of("explain", error) from None
        if reason == _NOT_MATRICES:
            folded = _fold(library, a, b, out, shape)
            if folded is not None:
                reason, data = _core.explain_call(folded.a, folded.b, folded.out)
    return Choice.from_dict(data)


def result_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the product of two shapes.

    Raises:
        ValueError: there is none; the message names both shapes.
    """
    if not a or not b:
        raise errors.bad_shapes(a, b, "a scalar has no matrix product")
    inner_b = b[-2] if len(b) > 1 else b[0]
    if a[-1] != inner_b:
        raise errors.bad_shapes(a, b, f"the inner extents are {a[-1]} and {inner_b}")
    batch = broadcast(a[:-2], b[:-2])
    if batch is None:
        raise errors.bad_shapes(a, b, f"the batches {a[:-2]} and {b[:-2]} do not broadcast")
    return batch + (a[-2:-1] if len(a) > 1 else ()) + (b[-1:] if len(b) > 1 else ())


def _known(a: Any) -> Library:
    library = library_of(a)
    assert library is not None  # the extension only names these reasons for arrays it has read
    return library


def _check(a: Any, b: Any, out: Any) -> tuple[Library, tuple[int, ...]]:
    library = library_of(a)
    if library is None or library_of(b) is not library:
        raise errors.not_arrays([_type_name(a), _type_name(b)])
    dtype, dtype_b = library.dtype(a), library.dtype(b)
    if dtype not in _DTYPES or (dtype != dtype_b and not (dtype_b in _DTYPES and library.casts(a))):
        raise errors.bad_dtypes([dtype, dtype_b])
    if not library.same_device(a, b):
        raise errors.bad_devices([library.device(a), library.device(b)])
    shape = result_shape(library.shape(a), library.shape(b))
    if out is not None:
        _check_out(library, a, b, out, shape)
    return library, shape


def _check_out(library: Library, a: Any, b: Any, out: Any, shape: tuple[int, ...]) -> None:
    if library_of(out) is not library:
        raise errors.not_arrays([_type_name(a), _type_name(b), f"out of {_type_name(out)}"])
    if library.shape(out) != shape:
        raise errors.bad_out(f"has shape {library.shape(out)}, the result has {shape}")
    if library.dtype(out) != library.dtype(a):
        raise errors.bad_out_dtype(library.dtype(out), library.dtype(a))
    if not library.same_device(out, a):
        raise errors.bad_out(f"is on {library.device(out)}, the operands are on {library.device(a)}")
    if not library.writable(out):
        raise errors.bad_out("is read-only")
    target = library.memory(out)
    if target is None:
        return
    if target.expanded:
        raise errors.bad_out("is expanded: several results would share one place")
    for name, operand in (("a", a), ("b", b)):
        source = library.memory(operand)
        if source is not None and target.overlaps(source):
            raise errors.bad_out(f"overlaps the memory of operand {name}")


@dataclass(frozen=True)
class _Folded:
    """One plain product whose result, seen in another shape, is the whole result."""

    a: Any
    b: Any
    out: Any


def _fold(library: Library, a: Any, b: Any, out: Any, shape: tuple[int, ...]) -> _Folded | None:
    """Turn vectors into matrices, and a batch over one b into rows; None where memory forbids it."""
    a_shape, b_shape = library.shape(a), library.shape(b)
    if (len(a_shape) == 1 and len(b_shape) == 1) or element_count(b_shape[:-2]) != 1 or 0 in shape:
        return None
    k = a_shape[-1]
    n = b_shape[-1] if len(b_shape) > 1 else 1
    if k == 0:
        return None
    if not _foldable(library, a, 1):
        return None
    if out is not None and not _foldable(library, out, 1 if len(b_shape) > 1 else 0):
        return None
    rows = element_count(a_shape[:-1])
    folded_a = a if len(a_shape) == 2 else a.reshape(rows, k)
    folded_b = b if len(b_shape) == 2 else b.reshape(k, n)
    return _Folded(folded_a, folded_b, None if out is None else out.reshape(rows, n))


def _foldable(library: Library, array: Any, keep: int) -> bool:
    if library.contiguous(array):
        return True
    memory = library.memory(array)
    return memory is not None and memory.foldable(keep)


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
