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
from ktlib_generator.progress import duration
from ktlib_generator.values import Record, Variant

# Rough, for the estimate only: one trial with its verification; one nvcc run of the raw PTX template.
TRIAL_S = {"cuda": 0.6, "cpu": 0.3}
COMPILE_S = 1.0


@dataclass(frozen=True)
class Plan:
    """What `ktlib-build tune` would do now. `compiles` counts binaries the cache lacks.

    `compiler` is the compiler's path, or why there is none; empty when nothing has to be compiled.
    """

    suite: str
    device: Device
    budget: Budget
    strategy: str
    problems: dict[Problem, tuple[int, int]]
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
        unserved = [str(problem) for problem, (space, _) in self.problems.items() if not space]
        lines = [
            "dry run: nothing is built, measured or written",
            f"device       {device.name} ({device.arch}, profile {device.profile})",
            f"suite        {self.suite}: {len(self.problems)} problems",
            f"strategy     {self.strategy}, budget {self.budget}",
        ]
        lines += [
            f"             {problem}: {space} candidates, {left} to try"
            for problem, (space, left) in self.problems.items()
            if space
        ]
        if unserved:
            lines.append(f"no kernel    {len(unserved)} problems: {' '.join(unserved)}")
        lines += [
            f"trials       {self.trials} to make, {self.made} made before",
            f"compiles     {self.compiles} binaries with {self.jobs} jobs"
            + (f" ({self.compiler})" if self.compiler else ""),
            f"estimate     {duration(self.estimate_s)}",
            f"run          {self.run_dir}",
            f"database     {self.database}",
        ]
        return "\n".join(lines)


def make_plan(
    suite: Suite,
    device: Device,
    families: Sequence[Family],
    history: Sequence[Record],
    *,
    budget: Budget,
    strategy: str,
    jobs: int,
    cache: BinaryCache,
    run_dir: Path,
    database: Path,
) -> Plan:
    """Count what the loop would do with this history and this cache."""
    tried: dict[Problem, set[Variant]] = {}
    for record in current_records(history, families):
        tried.setdefault(record.problem, set()).add(record.variant)
    problems: dict[Problem, tuple[int, int]] = {}
    requests: dict[BuildRequest, None] = {}
    made = 0
    for problem in suite.problems:
        space = [(variant, family) for family in families for variant in family.variants(problem, device)]
        old = tried.get(problem, set())
        made += sum(variant in old for variant, _ in space)
        left = budget.trials_left(len(space), sum(variant in old for variant, _ in space))
        problems[problem] = (len(space), left)
        for variant, family in space if left else ():
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
        problems=problems,
        made=made,
        compiles=compiles,
        compiler=compiler,
        jobs=jobs,
        run_dir=run_dir,
        database=database,
    )
