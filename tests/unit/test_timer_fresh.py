"""After timing, on made-up candidates: every set is looked at, skipped work seen, a busy machine forgiven."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ktlib.problem import Problem
from ktlib_generator.measure import fresh
from ktlib_generator.measure.arrays import NumpyArrays
from ktlib_generator.measure.timer import OperandSets
from ktlib_generator.values import Status

PROBLEM = Problem(24, 20, 16, layout="nt", dtype="fp32")
ARRAYS = NumpyArrays()


class OnDevice(NumpyArrays):
    """NumPy arrays that say they are on a GPU."""

    kind = "cuda"


class Kernel:
    """A right product, unless told to skip a set or to take long for some calls."""

    native = False

    def __init__(self, skip=None, slow_calls=0):
        self.skip, self.slow_calls = skip, slow_calls
        self.calls = []

    def run(self, a, b, c, stream):
        self.calls.append(c.address)
        if len(self.calls) <= self.slow_calls:
            time.sleep(0.002)
        if c.address != self.skip:
            np.matmul(a.logical, b.logical, out=c.logical)

    def time_ns(self, sets, calls):
        raise AssertionError("not native")


def timed_sets(count, arrays=ARRAYS):
    """Sets as timing leaves them: every output right."""
    sets = OperandSets(PROBLEM, arrays, count, seed=3)
    for operands in sets.own:
        Kernel().run(*operands, 0)
    return sets


def check(kernel, sets, arrays=ARRAYS, timed_us=200.0):
    return fresh.check(kernel, sets, PROBLEM, arrays, timed_us)


def test_right_candidate_passes_and_every_set_gets_new_contents():
    sets = timed_sets(3)
    before = [ARRAYS.copy(x.logical) for operands in sets.own for x in operands]
    kernel = Kernel()
    assert check(kernel, sets) is None
    assert set(kernel.calls) == {c.address for _, _, c in sets.own}
    after = [x.logical for operands in sets.own for x in operands]
    assert not any((x == y).any() for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("index", range(3))
def test_output_that_timing_did_not_write_is_seen_in_every_set(index):
    sets = timed_sets(3)
    sets.own[index][2].logical[...] = np.nan
    found = check(Kernel(), sets)
    assert found.status is Status.WRONG_RESULT
    assert "timed output" in found.reason


@pytest.mark.parametrize("index", range(3))
def test_call_that_keeps_an_old_answer_is_seen_in_every_set(index):
    sets = timed_sets(3)
    found = check(Kernel(skip=sets.own[index][2].address), sets)
    assert found.status is Status.WRONG_RESULT
    assert "new contents" in found.reason


def test_work_that_was_not_done_when_timed_is_refused():
    found = check(Kernel(slow_calls=10**6), timed_sets(2), timed_us=1.0)
    assert found.status is Status.REFUSED
    assert "had not seen" in found.reason


def test_slow_moments_of_a_busy_machine_are_not_held_against_a_candidate():
    sets = timed_sets(2)
    kernel = Kernel(slow_calls=2 * fresh.ROUNDS)
    assert check(kernel, sets) is None
    assert len(kernel.calls) == 2 * (fresh.ROUNDS + 1)


def test_cuda_is_judged_by_results_alone_on_a_draw_of_many_sets():
    arrays = OnDevice()
    sets = timed_sets(30, arrays)
    kernel = Kernel(slow_calls=10**6)
    assert check(kernel, sets, arrays, timed_us=1.0) is None
    assert len(set(kernel.calls)) == len(kernel.calls) == fresh.CUDA_SETS
    one = timed_sets(1, arrays)
    found = check(Kernel(skip=one.own[0][2].address), one, arrays)
    assert found.status is Status.WRONG_RESULT


def test_large_cuda_operands_keep_their_contents_and_are_poisoned_all_the_same(monkeypatch):
    monkeypatch.setattr(fresh, "CUDA_REFILL_BYTES", 16)
    arrays = OnDevice()
    sets = timed_sets(1, arrays)
    a, _, c = sets.own[0]
    before = arrays.copy(a.logical)
    assert check(Kernel(), sets, arrays) is None
    np.testing.assert_array_equal(a.logical, before)
    assert check(Kernel(skip=c.address), sets, arrays).status is Status.WRONG_RESULT


def test_seeds_after_timing_are_not_drawn_from_what_a_candidate_can_set():
    np.random.seed(1)
    first = [fresh.fresh_seed() for _ in range(4)]
    np.random.seed(1)
    assert len({*first, *(fresh.fresh_seed() for _ in range(4))}) == 8
