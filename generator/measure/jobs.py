"""What goes to the child process and what comes back: Job, Outcome, Limits.

Must not run anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ktlib.canonical import require_fields
from ktlib.problem import Problem
from ktlib_generator.families.base import Device, KernelFacts, LaunchParameters
from ktlib_generator.measure.timer import implausible
from ktlib_generator.values import Binary, Measurement, Status, Variant, Verification

# A month: statistics over samples below it stay finite.
LONGEST_SAMPLE_US = 2.6e12


@dataclass(frozen=True)
class Limits:
    """What one job may use. `start_s` is for the child to start and find its device.

    Address space is limited for CPU candidates only (CUDA reserves more than there is memory); resident
    memory is watched for both.
    """

    wall_s: float = 60.0
    memory_bytes: int = 16 * 2**30
    output_bytes: int = 2**20
    start_s: float = 180.0


@dataclass(frozen=True)
class Job:
    """One candidate to verify and time. Draw `seed` after the binary was built.

    Jobs of one problem that share a seed also share inputs, references and the choice of baseline, which
    the child keeps. `binary` is None for a vendor routine.
    """

    problem: Problem
    variant: Variant
    facts: KernelFacts | None
    binary: Binary | None
    protocol: str
    launch: LaunchParameters = field(default_factory=LaunchParameters)
    seed: int = 0

    def __post_init__(self) -> None:
        p = self.problem
        if p.batch != 1 or min(p.m, p.n, p.k) < 1:
            raise ValueError(
                f"measure: {p} is empty or batched; no kernel is launched for it, so none is timed"
            )

    def to_message(self) -> tuple[dict[str, Any], bytes]:
        """Return the fields as JSON types, and the binary's image as the blob."""
        return {
            "problem": self.problem.to_dict(),
            "variant": str(self.variant),
            "facts": None if self.facts is None else self.facts.to_dict(),
            "binary": None if self.binary is None else self.binary.to_dict(),
            "protocol": self.protocol,
            "launch": asdict(self.launch),
            "seed": self.seed,
        }, b"" if self.binary is None else self.binary.data

    @classmethod
    def from_message(cls, message: Mapping[str, Any], blob: bytes) -> Job:
        """Rebuild from `to_message`'s result."""
        names = ("problem", "variant", "facts", "binary", "protocol", "launch", "seed")
        require_fields("job", message, names)
        binary, facts = message["binary"], message["facts"]
        return cls(
            problem=Problem.from_dict(message["problem"]),
            variant=Variant.parse(message["variant"]),
            facts=None if facts is None else KernelFacts(**facts),
            binary=None if binary is None else Binary(**binary, data=blob),
            protocol=message["protocol"],
            launch=LaunchParameters(**message["launch"]),
            seed=message["seed"],
        )


@dataclass(frozen=True)
class Outcome:
    """How a job ended; the fields are those of a Record."""

    status: Status
    measurement: Measurement | None = None
    baseline: Measurement | None = None
    verification: Verification | None = None
    log: str = ""

    def require_answer_to(self, job: Job, device: Device) -> None:
        """Refuse what no honest measuring process answers to `job`, wherever it came from.

        Raises:
            ValueError: fields do not fit the status or the job, or a time is out of reach of the device.
        """
        vendor, ok = job.variant.is_vendor, self.status is Status.OK
        for name, needed in (("measurement", ok), ("verification", ok), ("baseline", ok and not vendor)):
            if (getattr(self, name) is not None) != needed:
                raise ValueError(f"{self.status.value} {'without' if needed else 'with'} a {name}")
        for name, taken in (("measurement", self.measurement), ("baseline", self.baseline)):
            if taken is None:
                continue
            wrong = implausible(job.problem, device, taken.latency_us)
            if wrong is not None:
                raise ValueError(f"{name}: {wrong}")
            if max(taken.samples_us) > LONGEST_SAMPLE_US:
                raise ValueError(f"{name}: a sample of {max(taken.samples_us):.4g} us is longer than a month")
        if self.measurement is not None:
            method = str(job.variant["method"]) if vendor else "ktlib_own"
            if (self.measurement.method, self.measurement.protocol) != (method, job.protocol):
                raise ValueError(f"a measurement of {self.measurement.method} by {self.measurement.protocol}")

    def to_message(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        data: dict[str, Any] = {"status": self.status.value, "log": self.log}
        for name in ("measurement", "baseline", "verification"):
            value = getattr(self, name)
            data[name] = None if value is None else value.to_dict()
        return data

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Outcome:
        """Rebuild from `to_message`'s result.

        Raises:
            ValueError: a field is missing or wrong, for example a time that is not positive.
        """
        require_fields("outcome", message, ("status", "log", "measurement", "baseline", "verification"))
        if not isinstance(message["log"], str):
            raise ValueError(f"outcome: log must be text, got {type(message['log']).__name__}")
        measurement, baseline = message["measurement"], message["baseline"]
        verification = message["verification"]
        return cls(
            status=Status(message["status"]),
            measurement=None if measurement is None else Measurement.from_dict(measurement),
            baseline=None if baseline is None else Measurement.from_dict(baseline),
            verification=None if verification is None else Verification.from_dict(verification),
            log=message["log"],
        )
