"""What a tuning run would do, without doing it: candidates, compiles, an estimate of the time.

Must not build, measure or write anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ktlib.problem import Problem
from ktlib_generator.budget import Budget
from ktlib_generator.build.cache import BinaryCache
from ktlib_generator.build.nvcc import find_nvcc, source_key
from ktlib_generator.build.toolkit import ToolchainError
from ktlib_generator.families.base import BuildRequest, Device, Family
from ktlib_generator.history import current_records
from ktlib_generator.problems import Suite
from ktlib_generator.progress import counted, duration, unserved_text
from ktlib_generator.start import protocol_for, require_one_protocol, spaces_of, why_unserved
from ktlib_generator.values import Record, Variant

# Rough, for the estimate only: one trial with its verification; one nvcc run of the raw PTX template.
TRIAL_S = {"cuda": 0.6, "cpu": 0.3}
COMPILE_S = 1.0


@dataclass(frozen=True)
class Plan:
    """What `ktlib-build tune` would do now. `compiles` counts binaries the cache lacks.

    `compiler` is the compiler's path, or why there is none; empty when nothing has to be compiled.
    `problems` has candidates and trials left of each problem; `unserved` why the others have none.
    """

    suite: str
    device: Device
    budget: Budget
    strategy: str
    protocol: str
    problems: dict[Problem, tuple[int, int]]
    unserved: dict[Problem, str]
    made: int
    compiles: int
    compiler: str
    jobs: int
    run_dir: Path
    database: Path

    @property
    def trials(self) -> int:
        """Trials still to make, by the count budget."""
        return sum(left for _, left in self.problems.values())

    @property
    def estimate_s(self) -> float:
        """Expected wall time; compiling overlaps with measuring."""
        measure_s = self.trials * TRIAL_S[self.device.kind]
        expected_s = max(measure_s, self.compiles * COMPILE_S / self.jobs)
        return expected_s if self.budget.wall_s is None else min(expected_s, self.budget.wall_s)

    def __str__(self) -> str:
        device = self.device
        lines = [
            "dry run: nothing is built, measured or written",
            device_line(device),
            f"suite        {self.suite}: {counted(len(self.problems) + len(self.unserved), 'problem')}",
            f"strategy     {self.strategy}, budget {self.budget}, protocol {self.protocol}",
        ]
        lines += [
            f"             {problem}: {counted(space, 'candidate')}, {left} to try"
            for problem, (space, left) in self.problems.items()
        ]
        if self.unserved:
            lines.append(f"no kernel    {unserved_text(self.unserved)}")
        lines += [
            f"trials       {self.trials} to make, {self.made} made before",
            f"compiles     {counted(self.compiles, 'binary')} with {counted(self.jobs, 'job')}"
            + (f" ({self.compiler})" if self.compiler else ""),
            f"estimate     {duration(self.estimate_s)}",
            f"run          {self.run_dir}",
            f"database     {self.database}",
        ]
        return "\n".join(lines)


def device_line(device: Device, why: str = "") -> str:
    """Say what is tuned for, and why if that may surprise."""
    where = f"device       {device.name} ({device.arch}, profile {device.profile})"
    return f"{where} ({why})" if why else where


def make_plan(
    suite: Suite,
    device: Device,
    families: Sequence[Family],
    history: Sequence[Record],
    *,
    budget: Budget,
    strategy: str,
    protocol: str,
    jobs: int,
    cache: BinaryCache,
    run_dir: Path,
    database: Path,
) -> Plan:
    """Count what the loop would do with this history and this cache.

    Raises:
        TuneError: the run would be refused; with the same message.
    """
    protocol = protocol_for(device, protocol)
    spaces = spaces_of(families, suite.problems, device)
    history = current_records(history, families)
    require_one_protocol(history, spaces, protocol, run_dir)
    tried: dict[Problem, set[Variant]] = {}
    for record in history:
        tried.setdefault(record.problem, set()).add(record.variant)
    problems: dict[Problem, tuple[int, int]] = {}
    requests: dict[BuildRequest, None] = {}
    made = 0
    for problem, space in spaces.items():
        if not space:
            continue
        old = tried.get(problem, set()) & space.keys()
        made += len(old)
        left = budget.trials_left(len(space), len(old))
        problems[problem] = (len(space), left)
        for variant, family in space.items() if left else ():
            request = family.build_request(variant) if variant not in old else None
            if request is not None:
                requests[request] = None
    compiler = ""
    compiles = len(requests)
    if requests:
        try:
            compiler = find_nvcc()
            compiles = sum(cache.load(source_key(request)) is None for request in requests)
        except ToolchainError as error:
            compiler = str(error)
    return Plan(
        suite=suite.name,
        device=device,
        budget=budget,
        strategy=strategy,
        protocol=protocol,
        problems=problems,
        unserved={p: why_unserved(families, p, device) for p, space in spaces.items() if not space},
        made=made,
        compiles=compiles,
        compiler=compiler,
        jobs=jobs,
        run_dir=run_dir,
        database=database,
    )
