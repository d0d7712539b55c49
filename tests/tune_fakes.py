"""Stand-ins for tuning tests: a CPU that is not this one, and a worker that answers from a table at once."""

from __future__ import annotations

import time
from pathlib import Path

from ktlib.problem import Problem
from ktlib_generator.build.cache import BinaryCache
from ktlib_generator.families.base import Device, Family
from ktlib_generator.families.cpu_gemm import CpuGemm
from ktlib_generator.measure.jobs import Job, Outcome
from ktlib_generator.problems import Suite
from ktlib_generator.tune import Tools, TuneOptions, tune
from ktlib_generator.values import Environment, Measurement, Status, Verification

DEVICE = Device("cpu", "a CPU", "cpu-x86_64_v3", 2)
GPU = Device("cuda", "a GPU", "sm90a", 132)
PROBLEMS = tuple(Problem(size, size, size, dtype="fp32") for size in (32, 64, 96))
SUITE = Suite("three", "this test", PROBLEMS)


def table_us(job: Job) -> float:
    """A made-up time: tile_m 4 and tile_n 16 are best."""
    return 10.0 + abs(job.variant.integer("tile_m") - 4) + abs(job.variant.integer("tile_n") - 16) / 8


class TableWorker:
    """Answers from the table.

    `fails` gives some jobs another status, `pause_s` makes trials take time, `spread` makes them noisy.
    """

    def __init__(
        self, *, fails=lambda job: None, pause_s: float = 0.0, baseline_us: float = 20.0, spread: float = 0.0
    ) -> None:
        self.jobs: list[Job] = []
        self.closed = 0
        self._fails = fails
        self._pause_s = pause_s
        self._baseline_us = baseline_us
        self._spread = spread

    def run(self, job: Job) -> Outcome:
        self.jobs.append(job)
        time.sleep(self._pause_s)
        status = self._fails(job)
        if status is not None:
            return Outcome(status=status, log=f"table says {status.value}")
        latency_us = table_us(job)
        return Outcome(
            status=Status.OK,
            measurement=Measurement("ktlib_own", job.protocol, self._samples_us(latency_us)),
            baseline=Measurement("numpy", job.protocol, (self._baseline_us,) * 5),
            verification=Verification(1.0, ("binary",)),
        )

    def _samples_us(self, latency_us: float) -> tuple[float, ...]:
        low, high = latency_us * (1 - self._spread), latency_us * (1 + self._spread)
        return (low, low, latency_us, high, high)

    def close(self) -> None:
        self.closed += 1


def tools(worker: TableWorker, folder: Path, device: Device, family: Family) -> Tools:
    return Tools(
        families=(family,),
        environment=Environment(device.name, device.arch, device.sm_count, "0" * 40, False),
        worker=lambda: worker,
        cache=BinaryCache(folder / "cache"),
    )


def run(
    paths, worker=None, *, suite=SUITE, device=DEVICE, family=None, resume=False, progress=None, **options
):
    worker = worker or TableWorker()
    return tune(
        suite,
        device,
        TuneOptions(**options),
        resume=resume,
        progress=progress,
        tools=tools(worker, paths["run_dir"].parent, device, family or CpuGemm()),
        **paths,
    )


def space_size(problem: Problem) -> int:
    return len(list(CpuGemm().variants(problem, DEVICE)))
