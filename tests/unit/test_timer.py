"""Timing's rules on made-up clocks: order, bad samples, budgets, impossible speeds."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest

from ktlib.canonical import finite_positive
from ktlib.problem import Problem
from ktlib_generator.families.base import Device
from ktlib_generator.measure import timer
from ktlib_generator.measure.arrays import NumpyArrays
from ktlib_generator.measure.timer import BrokenTimer, OperandSets, Timer, calls_for, implausible, interleave
from ktlib_generator.values import Measurement

H200 = Device("cuda", "NVIDIA H200", "sm90a", 132, 232448, 60 * 2**20)
CPU = Device("cpu", "a CPU", "cpu-portable", 2)


def ticking(step_s):
    """A clock that advances by the same amount at each look."""
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


def sampler(values, log, name):
    stream = iter(values)

    def take():
        log.append(name)
        return next(stream)

    return take


def test_order_alternates_so_that_drift_falls_on_both():
    log = []
    a, b = (sampler(itertools.count(1.0), log, name) for name in "ab")
    interleave([a, b], budget_s=0.0, clock=ticking(0.01))
    assert "".join(log) == "abbaabbaab"


def test_linear_drift_cancels_between_candidate_and_baseline():
    drift = itertools.count(100.0, 1.0)
    a, b = (lambda: next(drift)), (lambda: next(drift))
    samples = interleave([a, b], budget_s=math.inf, max_rounds=20)
    assert abs(statistics.mean(samples[0]) - statistics.mean(samples[1])) < 0.5


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_sample_that_is_no_time_is_dropped_with_its_partner(bad):
    log = []
    a = sampler([5.0, bad, 6.0, 7.0, 8.0, 9.0, 9.5], log, "a")
    b = sampler([1.0, 99.0, 2.0, 3.0, 4.0, 5.0, 5.5], log, "b")
    samples = interleave([a, b], budget_s=0.0, clock=ticking(0.01))
    assert samples == [(5.0, 6.0, 7.0, 8.0, 9.0), (1.0, 2.0, 3.0, 4.0, 5.0)]


@pytest.mark.parametrize("digits", [400, 10_000])  # Python does not even spell the second
def test_integer_beyond_every_float_is_no_time_and_no_crash(digits):
    with pytest.raises(ValueError, match="finite and positive"):
        finite_positive("a sample", 10**digits)


def test_clock_that_never_gives_a_time_is_called_broken():
    with pytest.raises(BrokenTimer, match="not finite and positive"):
        interleave([lambda: 0.0], budget_s=0.0, clock=ticking(0.01))


def test_clock_that_gives_one_number_for_everything_is_called_broken():
    with pytest.raises(BrokenTimer, match="stands still"):
        interleave([lambda: 3.0, lambda: 3.0], budget_s=0.0, clock=ticking(0.01))


def test_one_lucky_sample_does_not_make_a_candidate_fast():
    lucky = iter([10.0, 10.2, 1.0, 10.1, 9.9, *itertools.repeat(10.0, 45)])
    (samples,) = interleave([lambda: next(lucky)], budget_s=math.inf, max_rounds=50)
    assert Measurement("ktlib_own", "cpu-stream", samples).latency_us == pytest.approx(10.0)


def test_budget_stops_a_slow_candidate_but_not_before_enough_rounds():
    values = itertools.count(1.0)
    (few,) = interleave([lambda: next(values)], budget_s=0.005, clock=ticking(0.01))
    assert len(few) == timer.MIN_ROUNDS
    (some,) = interleave([lambda: next(values)], budget_s=0.055, clock=ticking(0.01))
    assert timer.MIN_ROUNDS < len(some) < 10
    (many,) = interleave([lambda: next(values)], budget_s=1e9, clock=ticking(0.01))
    assert len(many) == timer.MAX_ROUNDS


def test_samples_of_seconds_end_after_two_rounds():
    values = itertools.count(1.0)
    (few,) = interleave([lambda: next(values)], budget_s=1e9, clock=ticking(10.0))
    assert len(few) == 2


def test_calls_in_a_sample_follow_the_call():
    assert calls_for(1e6, "cuda") == 1
    assert calls_for(4.0, "cuda") == 100
    assert calls_for(1e-3, "cuda") == calls_for(0.0, "cuda") == calls_for(math.nan, "cuda") == 256


@pytest.mark.parametrize(
    ("shape", "latency_us", "refused"),
    [
        ((16384, 16384, 16384), 11000.0, False),  # 800 TFLOP/s: what a good kernel reaches
        ((16384, 16384, 16384), 4000.0, True),  # 2.2 PFLOP/s
        ((64, 64, 64), 1.02, False),  # the fastest graph node measured that moves data
        ((64, 64, 64), 0.1, True),
        ((1, 16384, 16384), 100.0, False),
        ((1, 16384, 16384), 10.0, True),  # 54 TB/s
    ],
)
def test_speed_above_what_an_h200_can_do_is_refused(shape, latency_us, refused):
    found = implausible(Problem(*shape), H200, latency_us)
    assert bool(found) == refused
    if refused:
        assert "implausible" in found
        assert "132 SMs" in found


def test_outputs_are_poisoned_before_and_apart_from_the_baselines():
    problem = Problem(9, 11, 13, layout="tn", dtype="fp32")
    sets = OperandSets(problem, NumpyArrays(), 3, seed=1)
    sets.poison()
    assert all(np.isnan(c.logical).all() for _, _, c in sets.own)
    addresses = {c.address for group in (sets.own, sets.vendor) for _, _, c in group}
    assert len(addresses) == 6
    assert all(x[0].address == y[0].address for x, y in zip(sets.own, sets.vendor, strict=True))
    a, other = sets.own[0][0].logical, sets.own[1][0].logical
    assert a.shape == (9, 13)
    assert not (a == other).any()


def test_sets_of_a_low_alignment_problem_have_that_alignment():
    problem = Problem(8, 16, 32, dtype="fp16", align=4)
    for a, b, c in OperandSets(problem, NumpyArrays(), 2, seed=1).own:
        assert [x.address % 8 for x in (a, b, c)] == [4, 4, 4]


class Kernel:
    """A candidate in Python that does nothing but count."""

    native = False

    def __init__(self):
        self.sets = []

    def run(self, a, b, c, stream):
        self.sets.append(a.address)

    def time_ns(self, sets, calls):
        raise AssertionError("not native")


def test_cpu_stream_rotates_over_the_sets_and_names_both_methods():
    problem = Problem(32, 32, 32, dtype="fp32")
    stopwatch = Timer(problem, CPU, NumpyArrays(), "cpu-stream", seed=1)
    kernel = Kernel()
    result = stopwatch.compare(kernel, "ktlib_own")
    assert (result.measurement.method, result.baseline.method) == ("ktlib_own", "numpy")
    assert len(set(kernel.sets)) == timer.CPU_SETS
    assert stopwatch.compare(kernel, "ktlib_own", with_baseline=False).baseline is None


def test_unknown_protocol_names_the_known_ones():
    with pytest.raises(ValueError, match="cpu-stream, cpu-loop"):
        Timer(Problem(4, 4, 4, dtype="fp32"), CPU, NumpyArrays(), "graph-hot", seed=1)
