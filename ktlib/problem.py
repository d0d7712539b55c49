"""What a call asks for (`Problem`) and what dispatch answers (`Choice`).

Must not know a GPU, a kernel's insides or an array library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from ktlib.canonical import canonical_json, fingerprint, require_fields

# The order is the number used in packs and in csrc/common/problem.hpp; a test compares the two.
DTYPES = ("fp16", "bf16", "fp32")
LAYOUTS = ("nn", "nt", "tn", "tt")
ACCUMULATES = ("fp32", "fp16")
EPILOGUES = ("none",)
TIERS = ("exact", "near", "model", "vendor_algorithm", "vendor")

ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
MAX_ALIGN_BYTES = 16
MAX_EXTENT = 2**31 - 1

_SHAPE = re.compile(r"^(\d+)x(\d+)x(\d+)$")
_OTHER_NAMES = {"half": "fp16", "float16": "fp16", "f16": "fp16", "bfloat16": "bf16"}
_OTHER_NAMES |= {"float": "fp32", "float32": "fp32", "f32": "fp32", "single": "fp32"}


def alignment_bytes(*byte_multiples: int) -> int:
    """Return the largest power of two, at most 16, that divides every argument (zero divides by all)."""
    align = MAX_ALIGN_BYTES
    for value in byte_multiples:
        while value % align:
            align //= 2
    return align


def _did_you_mean(got: object, allowed: tuple[str, ...]) -> str:
    name = str(got).lower().removeprefix("torch.")
    name = _OTHER_NAMES.get(name, name)
    if name in allowed:
        return f"; did you mean {name}?"
    return f"; a layout comes before it: nn:{name}" if name in DTYPES else ""


@dataclass(frozen=True)
class Problem:
    """One matrix product C[m, n] = A[m, k] B[k, n], as far as choosing a kernel depends on it.

    `layout` is the operands' storage, A then B: `n` row-major, `t` a transposed view (a [n, k] weight
    passed as `w.t()` is `nt`, which cuBLAS calls TN). `align` is the largest power of two, at most 16,
    that divides every operand's address and row stride in bytes; left out, it is that of contiguous
    operands. C is row-major and has the operands' dtype.

    The text form is `MxNxK:layout:dtype`, then `:field=value` for each field not at its default.
    """

    m: int
    n: int
    k: int
    layout: str = "nn"
    dtype: str = "fp16"
    accumulate: str = "fp32"
    batch: int = 1
    align: int = 0
    epilogue: str = "none"

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= MAX_EXTENT:
                raise ValueError(f"problem: {name} must be an integer in 0..{MAX_EXTENT}, got {value!r}")
        for name, allowed in (
            ("layout", LAYOUTS),
            ("dtype", DTYPES),
            ("accumulate", ACCUMULATES),
            ("epilogue", EPILOGUES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"problem: {name} {getattr(self, name)!r} is unknown (have: {', '.join(allowed)})"
                    + _did_you_mean(getattr(self, name), allowed)
                )
        if self.accumulate == "fp16" and self.dtype != "fp16":
            raise ValueError(f"problem: accumulate fp16 needs dtype fp16, got {self.dtype}")
        if self.align == 0 and type(self.align) is int:
            object.__setattr__(self, "align", self.contiguous_align)
        if type(self.align) is not int or self.align not in (1, 2, 4, 8, 16):
            raise ValueError(f"problem: align must be one of 1, 2, 4, 8, 16 bytes, got {self.align!r}")

    @property
    def contiguous_align(self) -> int:
        """Alignment in bytes when every operand is contiguous and allocated by a framework."""
        size = ELEMENT_BYTES[self.dtype]
        lda = self.k if self.layout[0] == "n" else self.m
        ldb = self.n if self.layout[1] == "n" else self.k
        return alignment_bytes(lda * size, ldb * size, self.n * size)

    @property
    def flops(self) -> int:
        """Multiplications and additions: 2 m n k for each batch entry."""
        return 2 * self.m * self.n * self.k * self.batch

    @property
    def bytes_moved(self) -> int:
        """Fewest bytes through device memory: A and B read once, C written once."""
        size = ELEMENT_BYTES[self.dtype]
        return size * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, as stored in records."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Problem:
        """Rebuild from `to_dict`'s result.

        Raises:
            ValueError: a field is missing, unknown or out of range.
        """
        require_fields("problem", data, tuple(field.name for field in fields(cls)))
        return cls(**data)

    def fingerprint(self) -> str:
        """Return the sha256 that names this problem; every field takes part."""
        return fingerprint(kind="problem", **self.to_dict())

    def __str__(self) -> str:
        text = f"{self.m}x{self.n}x{self.k}:{self.layout}:{self.dtype}"
        if self.accumulate != "fp32":
            text += f":accumulate={self.accumulate}"
        if self.batch != 1:
            text += f":batch={self.batch}"
        if self.align != self.contiguous_align:
            text += f":align={self.align}"
        if self.epilogue != "none":
            text += f":epilogue={self.epilogue}"
        return text

    @classmethod
    def parse(cls, text: str) -> Problem:
        """Read the text form; layout and dtype may be left out.

        Raises:
            ValueError: naming the text, what part is wrong and the accepted form.
        """
        form = "MxNxK[:layout[:dtype]][:field=value ...], for example 4096x4096x1024:nt:bf16"
        shape, *rest = text.strip().split(":")
        match = _SHAPE.match(shape)
        if match is None:
            which = f"{text!r} is" if shape == text else f"{text!r}: {shape!r} is"
            meant = f"; did you mean {shape.lower()}?" if _SHAPE.match(shape.lower()) else ""
            raise ValueError(f"problem {which} not MxNxK{meant or '; expected ' + form}")
        m, n, k = (int(group) for group in match.groups())
        values: dict[str, Any] = {}
        for position, part in enumerate(rest):
            name, equals, value = part.partition("=")
            if not equals:
                if position > 1:
                    raise ValueError(f"problem {text!r}: {part!r} is out of place; expected {form}")
                name, value = ("layout", "dtype")[position], part
            elif name not in ("accumulate", "batch", "align", "epilogue", "layout", "dtype"):
                raise ValueError(f"problem {text!r}: unknown field {name!r}; expected {form}")
            if name in ("batch", "align") and not value.isdecimal():
                raise ValueError(f"problem {text!r}: {name} must be a whole number, got {value!r}")
            if name in values:
                raise ValueError(f"problem {text!r}: {name} is given twice")
            values[name] = int(value) if name in ("batch", "align") else value
        return cls(m, n, k, **values)


@dataclass(frozen=True)
class Choice:
    """What dispatch decided for one call, and why.

    `tier` says how good the match is: `exact`, `near` (another tuned problem's kernel), `model`,
    `vendor_algorithm` or `vendor`. `kernel` is empty for the last. `launch` is the launch parameters
    (grid, block, shared memory, and the family's run-time parameters); `database` is the pack
    that decided, empty when none did.
    """

    kernel: str
    tier: str
    reason: str
    database: str = ""
    launch: tuple[tuple[str, int], ...] = ()
    latency_us: float | None = None
    vendor_us: float | None = None

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            raise ValueError(f"choice: tier {self.tier!r} is unknown (have: {', '.join(TIERS)})")
        if bool(self.kernel) == (self.tier == "vendor"):
            raise ValueError(f"choice: tier {self.tier!r} and kernel {self.kernel!r} disagree")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name; `launch` becomes a mapping."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        data["launch"] = dict(self.launch)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Choice:
        """Rebuild from `to_dict`'s result.

        Raises:
            ValueError: a field is missing, unknown or contradicts another.
        """
        require_fields("choice", data, tuple(field.name for field in fields(cls)))
        return cls(**{**data, "launch": tuple(sorted(data["launch"].items()))})

    def fingerprint(self) -> str:
        """Return the sha256 that names this choice; every field takes part."""
        return fingerprint(kind="choice", **self.to_dict())

    def __str__(self) -> str:
        return canonical_json(self.to_dict())

    @classmethod
    def parse(cls, text: str) -> Choice:
        """Read the text form (canonical JSON)."""
        import json

        return cls.from_dict(json.loads(text))
