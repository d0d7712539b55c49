"""The child process: receives jobs, loads, verifies and times candidates, answers. One per device.

Started by worker.py as `python -m ktlib_generator.measure.child READ_FD WRITE_FD LIFELINE_FD`. A candidate
may hang, crash or spoil this process; the parent replaces it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import resource
import sys
import traceback
from collections import OrderedDict
from typing import Any

from ktlib.problem import Problem
from ktlib_generator.families.base import Device
from ktlib_generator.measure import candidate as candidates
from ktlib_generator.measure import framing, fresh
from ktlib_generator.measure.arrays import Arrays, arrays_for
from ktlib_generator.measure.baselines import require_fp32_reduction
from ktlib_generator.measure.jobs import Job, Outcome
from ktlib_generator.measure.timer import BrokenTimer, Timer, implausible
from ktlib_generator.measure.traces import Traces
from ktlib_generator.measure.verify import Failure, Verifier
from ktlib_generator.values import Status

# Problems whose inputs and references are kept; large ones take gigabytes on a GPU.
KEPT_PROBLEMS = 2
# Of an exception's text, this much goes into the log.
LOG_CHARACTERS = 2**16


class Bench:
    """Everything kept between jobs: arrays, and for the last problems their verifiers and timers."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.arrays: Arrays = arrays_for(device)
        self._kept: OrderedDict[tuple[Problem, int], tuple[Verifier, dict[str, Timer]]] = OrderedDict()
        if device.kind == "cuda":
            require_fp32_reduction(self.arrays.xp)
            self.arrays.synchronize()

    def measure(self, job: Job) -> Outcome:
        """Verify, time, and verify again. Raises whatever a broken candidate raises."""
        verifier, timers = self._for_problem(job.problem, job.seed)
        kernel = candidates.load(
            job.variant, job.problem, job.binary, job.facts, job.launch, self.device.kind
        )
        splits = job.launch.split_k
        vendor = job.variant.is_vendor
        verification = verifier.verify(kernel.run, splits=splits, foreign=not vendor)
        if isinstance(verification, Failure):
            return Outcome(verification.status, log=verification.reason)
        if job.protocol not in timers:
            timers[job.protocol] = Timer(job.problem, self.device, self.arrays, job.protocol, job.seed)
        timer = timers[job.protocol]
        on_cpu = self.device.kind == "cpu"
        if on_cpu and not vendor:
            timer.prepare()
        traces = Traces.now()
        method = str(job.variant["method"]) if vendor else "ktlib_own"
        try:
            comparison = timer.compare(kernel, method, with_baseline=not vendor)
        except BrokenTimer as error:
            return Outcome(Status.REFUSED, log=str(error))
        self.arrays.synchronize()
        wrong = traces.left_since() if on_cpu and not vendor else None
        if wrong is not None:
            return Outcome(Status.REFUSED, log=f"after timing: {wrong}")
        timed_us = comparison.measurement.latency_us
        failure = fresh.check(kernel, timer.sets, job.problem, self.arrays, timed_us)
        if failure is not None:
            return Outcome(failure.status, log=failure.reason)
        wrong = verifier.verify_again(kernel.run, fresh.fresh_seed(), splits=splits)
        if wrong is not None:
            return Outcome(Status.WRONG_RESULT, log=wrong)
        for taken in filter(None, (comparison.measurement, comparison.baseline)):
            wrong = implausible(job.problem, self.device, taken.latency_us)
            if wrong is not None:
                return Outcome(Status.REFUSED, log=f"{taken.method}: {wrong}")
        return Outcome(Status.OK, comparison.measurement, comparison.baseline, verification)

    def _for_problem(self, problem: Problem, seed: int) -> tuple[Verifier, dict[str, Timer]]:
        key = (problem, seed)
        if key not in self._kept:
            while len(self._kept) >= KEPT_PROBLEMS:
                self._kept.popitem(last=False)
            self._kept[key] = (Verifier(problem, self.arrays, seed), {})
        self._kept.move_to_end(key)
        return self._kept[key]

    def is_spoilt(self) -> bool:
        """Whether the device has a sticky error: every later call would fail, so this process must end."""
        try:
            self.arrays.synchronize()
            if self.device.kind == "cuda":
                self.arrays.xp.zeros(1, device="cuda").item()
        except Exception:  # whatever the driver raises, the answer is the same
            return True
        return False


def limit_address_space(extra_bytes: int) -> None:
    """Let this process map `extra_bytes` more than it has now. For CPU candidates only."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + extra_bytes
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def die_with(lifeline: int) -> None:
    """End this process (by SIGIO) when the parent's end of the pipe closes, even inside a hung candidate."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def serve(read: int, write: int) -> None:
    """Answer jobs until the parent closes the pipe."""
    unpacker = framing.Unpacker()
    setup, _ = framing.receive(read, unpacker)
    device = Device(**setup["device"])
    bench = Bench(device)
    if device.kind == "cpu":
        limit_address_space(setup["memory_bytes"])
    framing.send(write, {"ready": dataclasses.asdict(device)})
    while True:
        message, blob = framing.receive(read, unpacker)
        number = message.pop("job")
        spoilt = False
        try:
            outcome = bench.measure(Job.from_message(message, blob))
            spoilt = device.kind == "cpu" and outcome.status is Status.REFUSED  # what it left behind stays
        except Exception as error:  # a candidate may raise anything; the record says what
            detail = "".join(traceback.format_exception_only(type(error), error)).strip()
            outcome = Outcome(Status.LAUNCH_ERROR, log=detail[:LOG_CHARACTERS])
            spoilt = bench.is_spoilt()
        answer: dict[str, Any] = {"job": number, "spoilt": spoilt, **outcome.to_message()}
        framing.send(write, answer)
        if spoilt:
            os._exit(1)  # no clean-up: the device's context is lost


def main(arguments: list[str]) -> None:
    """Entry of the process."""
    read, write, lifeline = (int(argument) for argument in arguments)
    die_with(lifeline)
    with contextlib.suppress(framing.ClosedPipe):
        serve(read, write)
    os._exit(0)  # no destructors: a candidate's may hang


if __name__ == "__main__":
    main(sys.argv[1:])
