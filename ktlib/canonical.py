"""Canonical text and fingerprints: one spelling for every value that is stored or looked up.

Must not know any value type; those build on it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any


def canonical_json(value: Any) -> str:
    """Spell `value` as JSON with sorted keys, no spaces and no NaN, so equal values give equal text.

    Raises:
        ValueError: a float is NaN or infinite (JSON has no such number).
        TypeError: the value holds something JSON cannot say.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def fingerprint(*, kind: str, **fields: Any) -> str:
    """Hash named fields: sha256 (64 hexadecimal digits) over canonical JSON.

    Every field is named and delimited, so `("a", "bc")` and `("ab", "c")` differ, and so do two
    kinds with the same fields.
    """
    import hashlib

    text = canonical_json({"kind": kind, "fields": fields})
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def bytes_fingerprint(data: bytes) -> str:
    """Return the sha256 (64 hexadecimal digits) of raw bytes, as `sha256sum` prints it."""
    import hashlib

    return hashlib.sha256(data).hexdigest()


def require_fields(
    what: str, mapping: Mapping[str, Any], required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> None:
    """Refuse a mapping whose keys are not exactly the named ones (optional ones may be absent).

    Raises:
        ValueError: naming what is missing and what is unknown.
    """
    missing = [name for name in required if name not in mapping]
    unknown = [name for name in mapping if name not in required and name not in optional]
    if missing or unknown:
        raise ValueError(f"{what}: missing fields {missing}, unknown fields {unknown}")


def finite_positive(what: str, value: float) -> float:
    """Return `value` as a float if it is a finite number above zero and not subnormal.

    Raises:
        ValueError: zero, negative, subnormal, NaN or infinite; such a time is a broken clock, not a speed.
    """
    try:
        number = float(value)
    except OverflowError:  # an integer beyond every float
        number = math.inf
    if not math.isfinite(number) or number < sys.float_info.min:
        raise ValueError(f"{what} must be finite and positive, got {_short(value)}")
    return number


def _short(value: object) -> str:
    """Spell a value for a message; Python refuses to spell integers of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "an integer of thousands of digits"
    return text if len(text) <= 40 else f"{text[:40]}..."
