"""Timing: how long a candidate takes next to the fastest baseline, both measured in one interleaved run.

Must not judge numbers or choose winners. A protocol is a way to take one sample; everything above a sample
(rounds, order, bad clocks) is the same for all of them and pure.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ktlib.problem import ELEMENT_BYTES, Problem
from ktlib_generator.families.base import Device
from ktlib_generator.measure.arrays import Arrays
from ktlib_generator.measure.baselines import VendorRoutine, baselines
from ktlib_generator.measure.candidate import Candidate
from ktlib_generator.measure.operands import Operand, place
from ktlib_generator.values import Measurement

# What one sample is, by protocol:
#   graph-hot   kernel time: a CUDA graph of n calls on one set of operands, over n
#   graph-cold  the same with a set per call, L2 overwritten before each replay
#   stream      n calls from Python back to back and one synchronise, over n
#   cpu-stream  n calls from Python on rotating sets, over n; both sides from Python, so comparable
#   cpu-loop    n calls from C++ on rotating sets, over n: the kernel alone. Its baseline is `cpu-stream`
PROTOCOLS = {"cuda": ("graph-hot", "graph-cold", "stream"), "cpu": ("cpu-stream", "cpu-loop")}

Sampler = Callable[[], float]
OperandSet = tuple[Operand, Operand, Operand]

SAMPLE_US = {"cuda": 400.0, "cpu": 2000.0}
MAX_CALLS = {"cuda": 256, "cpu": 2000}
MIN_ROUNDS, MAX_ROUNDS = 5, 25
# A run this long is cut off after two rounds: medians of two are poor, but nothing else would end in time.
LONG_RUN_S, LONG_RUN_ROUNDS = 5.0, 2
LONG_CALL_US = 200_000.0
BUDGET_S = {"cuda": 0.015, "cpu": 0.1}
# A round may come out wrong this often in all before the clock is called broken.
MAX_BAD_SAMPLES = 10
COLD_L2_MULTIPLE = 3
CPU_SETS, CPU_SETS_BYTES = 4, 64 * 2**20

# Dense 16-bit tensor-core FLOPs a clock and SM, and a boost clock above any that ships; a core's widest FMA.
FLOPS_PER_SM = {"cuda": 4096 * 2.1e9, "cpu": 128 * 6.0e9}
# Above every L2 and cache bandwidth measured so far (6.1 TB/s on the H200); operands may sit there.
BYTES_PER_S = {"cuda": 2.0e13, "cpu": math.inf}
FASTEST_CALL_US = {"cuda": 0.3, "cpu": 0.001}


class BrokenTimer(RuntimeError):
    """Samples that no clock should give: not positive, not finite, or all the same."""


@dataclass(frozen=True)
class Comparison:
    """Candidate and baseline from the same interleaved run; no baseline when the candidate is a vendor's."""

    measurement: Measurement
    baseline: Measurement | None


class SampleSource(Protocol):
    """What a protocol provides: the sets it rotates over, and a sampler of one method's calls."""

    sets: OperandSets

    def sampler(self, method: Candidate, own_outputs: bool) -> Sampler:
        """Warm a method up and return what takes one sample of it, in microseconds a call."""


class Timer:
    """Times the candidates of one problem under one protocol; sets, baseline and its graph are kept."""

    def __init__(self, problem: Problem, device: Device, arrays: Arrays, protocol: str, seed: int) -> None:
        if protocol not in PROTOCOLS[device.kind]:
            have = ", ".join(PROTOCOLS[device.kind])
            raise ValueError(f"protocol {protocol!r} is unknown for {device.kind} (have: {have})")
        self.protocol, self._device = protocol, device
        self._source: SampleSource
        if device.kind == "cuda":
            from ktlib_generator.measure.cuda_timer import CudaSource

            self._source = CudaSource(problem, device, arrays, protocol, seed)
        else:
            self._source = CpuSource(problem, arrays, protocol, seed)
        self._baseline: tuple[VendorRoutine, Sampler] | None = None
        self._routines = baselines(problem, device.kind)
        if protocol == "stream":
            # Choosing cuBLASLt costs host time in each call, which here would count against it.
            self._routines = self._routines[:1]

    def prepare(self) -> None:
        """Choose the baseline now, so that its libraries start no thread while a candidate is timed."""
        self._fastest_baseline()

    @property
    def sets(self) -> OperandSets:
        """The operands that are timed; candidates write to `sets.own`, baselines to `sets.vendor`."""
        return self._source.sets

    def compare(self, candidate: Candidate, method: str, *, with_baseline: bool = True) -> Comparison:
        """Measure a candidate interleaved with the fastest baseline.

        Raises:
            BrokenTimer: the clock cannot be believed.
        """
        self.sets.poison()
        samplers = [self._source.sampler(candidate, True)]
        routine: VendorRoutine | None = None
        if with_baseline:
            routine, sampler = self._fastest_baseline()
            samplers.append(sampler)
        samples = interleave(samplers, budget_s=BUDGET_S[self._device.kind] * len(samplers))
        measurement = Measurement(method, self.protocol, samples[0])
        if routine is None:
            return Comparison(measurement, None)
        protocol = "cpu-stream" if self.protocol == "cpu-loop" else self.protocol
        return Comparison(measurement, Measurement(routine.method, protocol, samples[1]))

    def _fastest_baseline(self) -> tuple[VendorRoutine, Sampler]:
        """Try every baseline once per problem and keep the faster one; its times are still taken anew."""
        if self._baseline is None:
            tried = [(routine, self._source.sampler(routine, False)) for routine in self._routines]
            if len(tried) == 1:
                self._baseline = tried[0]
            else:
                samples = interleave([sampler for _, sampler in tried], budget_s=0.02)
                medians = [statistics.median(column) for column in samples]
                self._baseline = tried[medians.index(min(medians))]
        return self._baseline


class OperandSets:
    """`count` sets of random operands; candidates and baselines have their own outputs."""

    def __init__(self, problem: Problem, arrays: Arrays, count: int, seed: int) -> None:
        self._arrays, self._dtype = arrays, problem.dtype
        a, _ = _pool(problem, "a", arrays, count, seed)
        b, _ = _pool(problem, "b", arrays, count, seed + 1)
        own, self._own_buffer = _pool(problem, "c", arrays, count, None)
        vendor, _ = _pool(problem, "c", arrays, count, None)
        self.own: list[OperandSet] = list(zip(a, b, own, strict=True))
        self.vendor: list[OperandSet] = list(zip(a, b, vendor, strict=True))

    def refill(self, index: int, seed: int) -> None:
        """Give A and B of one set new values."""
        for i, operand in enumerate(self.own[index][:2]):
            rows, cols = operand.logical.shape
            values = self._arrays.normal(int(rows), int(cols), seed + i)
            self._arrays.assign(operand.logical, self._arrays.encode(values, self._dtype))

    def poison(self) -> None:
        """Fill the candidate's outputs with NaN, so that a call that wrote nothing is seen."""
        self._own_buffer[...] = 0xFF
        self._arrays.synchronize()  # timing runs on a stream of its own


def _pool(
    problem: Problem, name: str, arrays: Arrays, count: int, seed: int | None
) -> tuple[list[Operand], Any]:
    """Allocate `count` operands in one buffer, each as the problem aligns it, filled with normal values."""
    where = place(problem, name)
    size = ELEMENT_BYTES[problem.dtype]
    stride = -(-(where.offset_bytes + where.span_bytes(problem.dtype)) // 256) * 256
    buffer = arrays.buffer(stride * count)
    if seed is not None:
        elements = stride * count // size
        flat = arrays.matrix(buffer, 0, 1, elements, elements, problem.dtype)
        step = 2**26  # bounds the float32 copies of a large pool
        for start in range(0, elements, step):
            part = arrays.normal(1, min(step, elements - start), seed + start)
            arrays.assign(flat[:, start : start + step], arrays.encode(part, problem.dtype))
    operands = []
    for i in range(count):
        start = i * stride + where.offset_bytes
        stored = arrays.matrix(buffer, start, where.rows, where.cols, where.ld, problem.dtype)
        logical = stored.T if where.transposed else stored
        operands.append(Operand(arrays.address(buffer) + start, where.ld, logical))
    return operands, buffer


class CpuSource:
    """Samples on the CPU: calls from Python, or from C++ where the method can."""

    def __init__(self, problem: Problem, arrays: Arrays, protocol: str, seed: int) -> None:
        count = max(1, min(CPU_SETS, CPU_SETS_BYTES // max(1, problem.bytes_moved)))
        self.sets = OperandSets(problem, arrays, count, seed)
        self._native = protocol == "cpu-loop"

    def sampler(self, method: Candidate, own_outputs: bool) -> Sampler:
        sets = self.sets.own if own_outputs else self.sets.vendor
        loop = method.time_ns if self._native and method.native else _python_loop(method)
        call_us = loop(sets, 1) / 1000.0
        if call_us < LONG_CALL_US:
            loop(sets, len(sets))
            call_us = loop(sets, 2) / 2000.0
        calls = calls_for(call_us, "cpu")
        return lambda: loop(sets, calls) / 1000.0 / calls


def _python_loop(method: Candidate) -> Callable[[Sequence[OperandSet], int], int]:
    """Calls from Python, as a user's are."""

    def loop(sets: Sequence[OperandSet], calls: int) -> int:
        run, count = method.run, len(sets)
        start = time.perf_counter_ns()
        for i in range(calls):
            a, b, c = sets[i % count]
            run(a, b, c, 0)
        return time.perf_counter_ns() - start

    return loop


def calls_for(call_us: float, kind: str) -> int:
    """Calls in one sample: enough that the clock's own resolution and start-up do not show."""
    if not call_us > 0.0:
        return MAX_CALLS[kind]
    return int(max(1, min(MAX_CALLS[kind], math.ceil(SAMPLE_US[kind] / call_us))))


def interleave(
    samplers: Sequence[Sampler],
    *,
    budget_s: float,
    min_rounds: int = MIN_ROUNDS,
    max_rounds: int = MAX_ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[float, ...]]:
    """Take rounds of one sample of each, in alternating order, until the budget or `max_rounds` is reached.

    A round with a sample that is not finite and positive is dropped whole, so the columns stay paired.
    At least `min_rounds` are taken, two when they take longer than `LONG_RUN_S`.

    Raises:
        BrokenTimer: too many bad samples, or every sample of every method is the same number.
    """
    columns: list[list[float]] = [[] for _ in samplers]
    bad: list[float] = []
    start = clock()
    for round_number in range(max_rounds + MAX_BAD_SAMPLES):
        order = range(len(samplers)) if round_number % 2 == 0 else reversed(range(len(samplers)))
        taken = {i: samplers[i]() for i in order}
        wrong = [value for value in taken.values() if not (math.isfinite(value) and value > 0.0)]
        bad += wrong
        if len(bad) > MAX_BAD_SAMPLES:
            raise BrokenTimer(
                f"timing: {len(bad)} samples are not finite and positive, the last is {bad[-1]!r}"
            )
        if not wrong:
            for i, value in taken.items():
                columns[i].append(value)
        rounds = len(columns[0])
        if rounds >= max_rounds:
            break
        if rounds >= LONG_RUN_ROUNDS:
            spent_s = clock() - start
            if spent_s >= LONG_RUN_S or (rounds >= min_rounds and spent_s >= budget_s):
                break
    if len({value for column in columns for value in column}) == 1:
        raise BrokenTimer(f"timing: every sample is {columns[0][0]!r} us; the clock stands still")
    return [tuple(column) for column in columns]


def implausible(problem: Problem, device: Device, latency_us: float) -> str | None:
    """Say why a time cannot be real: faster than the device's arithmetic or memory could ever be."""
    kind = device.kind
    floor_us = max(
        1e6 * problem.flops / (FLOPS_PER_SM[kind] * device.sm_count),
        1e6 * problem.bytes_moved / BYTES_PER_S[kind],
        FASTEST_CALL_US[kind],
    )
    if latency_us >= floor_us:
        return None
    return (
        f"implausible speed: {latency_us:.4g} us a call, but {problem} needs at least {floor_us:.4g} us on "
        f"{device.name} ({device.sm_count} SMs or cores); the work was not done"
    )
