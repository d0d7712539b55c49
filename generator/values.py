"""The values that flow through the generator: Variant, Binary, Measurement, Record, Environment.

All are frozen and their text form round-trips. Must not build, time or store anything.
"""

from __future__ import annotations

import enum
import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from ktlib.canonical import canonical_json, fingerprint, finite_positive, require_fields
from ktlib.problem import Problem

ParameterValue = int | str
_V = TypeVar("_V", bound="JsonValue")

_NAME = re.compile(r"^[a-z][a-z0-9_]*$")
_WORD = re.compile(r"^[A-Za-z0-9_.+-]+$")

VENDOR_FAMILY = "vendor"


class JsonValue:
    """Shared by the values whose text form is canonical JSON of their fields."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, in plain JSON types."""
        raise TypeError(f"{type(self).__name__} must define to_dict")

    @classmethod
    def from_dict(cls: type[_V], data: Mapping[str, Any]) -> _V:
        """Rebuild from `to_dict`'s result; raises ValueError naming the field that is wrong."""
        raise TypeError(f"{cls.__name__} must define from_dict")

    def fingerprint(self) -> str:
        """Return the sha256 that names this value; every field takes part."""
        return fingerprint(kind=type(self).__name__.lower(), **self.to_dict())

    def __str__(self) -> str:
        return canonical_json(self.to_dict())

    @classmethod
    def parse(cls: type[_V], text: str) -> _V:
        """Read the text form; raises ValueError on anything else."""
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError(f"{cls.__name__.lower()}: expected a JSON object, got {text[:80]!r}")
        return cls.from_dict(data)


@dataclass(frozen=True)
class Variant:
    """A kernel family with one value for every parameter, for one architecture.

    The text form is `family/name=value,name=value/arch`, names sorted. A vendor routine is a variant
    of the family `vendor`, so baselines are recorded like everything else.
    """

    family: str
    config: tuple[tuple[str, ParameterValue], ...]
    arch: str

    def __post_init__(self) -> None:
        if not _NAME.match(self.family):
            raise ValueError(f"variant: family {self.family!r} is not a lower-case name")
        if not _WORD.match(self.arch):
            raise ValueError(f"variant: arch {self.arch!r} holds characters outside [A-Za-z0-9_.+-]")
        object.__setattr__(self, "config", tuple(sorted(self.config)))
        names = [name for name, _ in self.config]
        if len(set(names)) != len(names):
            raise ValueError(f"variant: a parameter is given twice in {names}")
        for name, value in self.config:
            if not _NAME.match(name):
                raise ValueError(f"variant: parameter {name!r} is not a lower-case name")
            word = type(value) is str and _WORD.match(value) and not re.fullmatch(r"[+-]?\d+", value)
            if type(value) is not int and not word:
                raise ValueError(f"variant: {name} must be an integer or a word, got {value!r}")

    @classmethod
    def make(cls, family: str, arch: str, **config: ParameterValue) -> Variant:
        """Build a variant from keyword parameters."""
        return cls(family, tuple(config.items()), arch)

    def __getitem__(self, name: str) -> ParameterValue:
        for key, value in self.config:
            if key == name:
                return value
        raise KeyError(f"variant {self}: no parameter {name!r}")

    def integer(self, name: str) -> int:
        """Return an integer parameter; raises ValueError when it is a word."""
        value = self[name]
        if type(value) is not int:
            raise ValueError(f"variant {self}: {name} must be an integer, got {value!r}")
        return value

    def replace(self, **changes: ParameterValue) -> Variant:
        """Return a copy with some parameters changed or added."""
        return Variant(self.family, tuple({**dict(self.config), **changes}.items()), self.arch)

    @property
    def is_vendor(self) -> bool:
        """Whether this is a vendor routine, never counted as a kernel of ours."""
        return self.family == VENDOR_FAMILY

    def fingerprint(self) -> str:
        """Return the sha256 that names this variant; family, every parameter and arch take part."""
        return fingerprint(
            kind="variant", family=self.family, config=[list(p) for p in self.config], arch=self.arch
        )

    def __str__(self) -> str:
        config = ",".join(f"{name}={value}" for name, value in self.config)
        return f"{self.family}/{config}/{self.arch}"

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read the text form.

        Raises:
            ValueError: naming the part that is not `family/name=value,.../arch`.
        """
        parts = text.split("/")
        if len(parts) != 3:
            raise ValueError(f"variant {text!r}: expected family/name=value,.../arch")
        family, config_text, arch = parts
        config: list[tuple[str, ParameterValue]] = []
        for part in filter(None, config_text.split(",")):
            name, equals, value = part.partition("=")
            if not equals:
                raise ValueError(f"variant {text!r}: {part!r} is not name=value")
            config.append((name, int(value) if re.fullmatch(r"-?\d+", value) else value))
        return cls(family, tuple(config), arch)


@dataclass(frozen=True)
class Binary(JsonValue):
    """A compiled kernel: its bytes by content, and what the compiler said about them.

    `data` is the image itself (empty for a kernel compiled into the extension); it takes part in
    equality through `sha256`, and the text form leaves it out. `source` fingerprints source, flags,
    compiler version and arch, so a stale binary is never taken for a new one.
    """

    format: str
    symbol: str
    sha256: str
    source: str
    registers: int
    smem_bytes: int
    spill_bytes: int
    data: bytes = field(default=b"", repr=False, compare=False)

    FORMATS = ("cubin", "shared_object", "builtin")

    def __post_init__(self) -> None:
        if self.format not in self.FORMATS:
            raise ValueError(f"binary: format {self.format!r} is unknown (have: {', '.join(self.FORMATS)})")
        for name in ("registers", "smem_bytes", "spill_bytes"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise ValueError(f"binary: {name} must be zero or more, got {getattr(self, name)!r}")

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "data"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Binary:
        require_fields("binary", data, tuple(f.name for f in fields(cls) if f.name != "data"))
        return cls(**data)


@dataclass(frozen=True)
class BuildFailure:
    """A variant that did not become a binary: `reason` in a line, `log` as the compiler wrote it."""

    reason: str
    log: str = ""


class Status(enum.Enum):
    """How a candidate ended. Only `OK` carries a measurement."""

    OK = "ok"
    BUILD_ERROR = "build_error"
    LAUNCH_ERROR = "launch_error"
    WRONG_RESULT = "wrong_result"
    TIMEOUT = "timeout"
    REFUSED = "refused"


@dataclass(frozen=True)
class Measurement(JsonValue):
    """Times of one method under one protocol, in microseconds; every sample is kept."""

    method: str
    protocol: str
    samples_us: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.method or not self.protocol:
            raise ValueError("measurement: method and protocol must be named")
        if not self.samples_us:
            raise ValueError(f"measurement of {self.method}: no samples")
        samples = tuple(finite_positive("measurement: a sample (us)", s) for s in self.samples_us)
        object.__setattr__(self, "samples_us", samples)

    @property
    def latency_us(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples_us)

    @property
    def noise(self) -> float:
        """Half the spread between quartiles over the median (0 for fewer than two samples)."""
        if len(self.samples_us) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return (high - low) / 2.0 / self.latency_us

    def to_dict(self) -> dict[str, Any]:
        return {"method": self.method, "protocol": self.protocol, "samples_us": list(self.samples_us)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        require_fields("measurement", data, ("method", "protocol", "samples_us"))
        return cls(data["method"], data["protocol"], tuple(data["samples_us"]))


@dataclass(frozen=True)
class Environment(JsonValue):
    """Where and with what a measurement was made.

    `arch` and `sm_count` (cores for a CPU) are what a database is matched by; the rest is information.
    `facts` holds versions and settings by name (driver, cublas, torch, clocks_mhz, power_limit_w ...).
    """

    device: str
    arch: str
    sm_count: int
    commit: str
    dirty: bool
    facts: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", tuple(sorted(self.facts)))
        if not _WORD.match(self.arch):
            raise ValueError(f"environment: arch {self.arch!r} holds characters outside [A-Za-z0-9_.+-]")
        if type(self.sm_count) is not int or self.sm_count < 1:
            raise ValueError(f"environment: sm_count must be at least 1, got {self.sm_count!r}")

    @property
    def profile(self) -> str:
        """Name of the database this environment writes: `sm90a-132`; a CPU's is its arch."""
        return self.arch if self.arch.startswith("cpu-") else f"{self.arch}-{self.sm_count}"

    def to_dict(self) -> dict[str, Any]:
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["facts"] = dict(self.facts)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Environment:
        require_fields("environment", data, tuple(f.name for f in fields(cls)))
        return cls(**{**data, "facts": tuple(data["facts"].items())})


@dataclass(frozen=True)
class Verification(JsonValue):
    """What verification found: error over the rounding-only value, and each check by name."""

    rms_ratio: float
    checks: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rms_ratio", float(self.rms_ratio))
        if not 0.0 <= self.rms_ratio < float("inf"):
            raise ValueError(f"verification: rms_ratio must be finite, zero or more, got {self.rms_ratio!r}")

    def to_dict(self) -> dict[str, Any]:
        return {"rms_ratio": self.rms_ratio, "checks": list(self.checks)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verification:
        require_fields("verification", data, ("rms_ratio", "checks"))
        return cls(data["rms_ratio"], tuple(data["checks"]))


@dataclass(frozen=True)
class Record(JsonValue):
    """One trial as stored: problem, variant, environment, status, and what that status allows.

    `OK` has a measurement, and a baseline measured interleaved with it unless the variant is the
    vendor's; every other status has a `log` that says what happened and no measurement.
    """

    problem: Problem
    variant: Variant
    environment: Environment
    status: Status
    measured_unix: int
    measurement: Measurement | None = None
    baseline: Measurement | None = None
    verification: Verification | None = None
    binary: Binary | None = None
    log: str = ""

    def __post_init__(self) -> None:
        if (self.status is Status.OK) != (self.measurement is not None):
            raise ValueError(
                f"record: status {self.status.value} and measurement {self.measurement} disagree"
            )
        if self.status is not Status.OK and self.baseline is not None:
            raise ValueError(f"record: status {self.status.value} allows no baseline")
        if type(self.measured_unix) is not int:
            raise ValueError(f"record: measured_unix must be whole seconds, got {self.measured_unix!r}")
        if type(self.log) is not str:
            raise ValueError(f"record: log must be text, got {type(self.log).__name__}")
        if self.status is not Status.OK and not self.log:
            raise ValueError(f"record: status {self.status.value} needs a log saying what happened")

    @property
    def key(self) -> str:
        """Identity of the trial for resuming: problem, variant and device, not the outcome."""
        return trial_key(self.problem, self.variant, self.environment.arch, self.environment.sm_count)

    @property
    def speedup(self) -> float | None:
        """Baseline's median over this record's, measured interleaved; None without both."""
        if self.measurement is None or self.baseline is None:
            return None
        return self.baseline.latency_us / self.measurement.latency_us

    def to_dict(self) -> dict[str, Any]:
        def optional(value: JsonValue | None) -> dict[str, Any] | None:
            return None if value is None else value.to_dict()

        return {
            "problem": self.problem.to_dict(),
            "variant": str(self.variant),
            "environment": self.environment.to_dict(),
            "status": self.status.value,
            "measured_unix": self.measured_unix,
            "measurement": optional(self.measurement),
            "baseline": optional(self.baseline),
            "verification": optional(self.verification),
            "binary": optional(self.binary),
            "log": self.log,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        require_fields("record", data, tuple(f.name for f in fields(cls)))

        def optional(kind: type[_V], name: str) -> _V | None:
            return None if data[name] is None else kind.from_dict(data[name])

        return cls(
            problem=Problem.from_dict(data["problem"]),
            variant=Variant.parse(data["variant"]),
            environment=Environment.from_dict(data["environment"]),
            status=Status(data["status"]),
            measured_unix=data["measured_unix"],
            measurement=optional(Measurement, "measurement"),
            baseline=optional(Measurement, "baseline"),
            verification=optional(Verification, "verification"),
            binary=optional(Binary, "binary"),
            log=data["log"],
        )


def trial_key(problem: Problem, variant: Variant, arch: str, sm_count: int) -> str:
    """Return what `Record.key` would be for a trial not yet made, so a resumed run can skip it."""
    return fingerprint(
        kind="trial", problem=problem.to_dict(), variant=str(variant), arch=arch, sm_count=sm_count
    )
