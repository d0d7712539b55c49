"""After timing: the timed outputs are right, and contents never seen take no longer than the timed ones.

Finds what timing itself invites: calls that are skipped because the output still holds the answer, that are
done for some of the operands only, or that are put off until nobody looks.
"""

from __future__ import annotations

import os
import random
import time

from ktlib.problem import ELEMENT_BYTES, Problem
from ktlib_generator.measure.arrays import Arrays
from ktlib_generator.measure.candidate import Candidate
from ktlib_generator.measure.timer import OperandSet, OperandSets
from ktlib_generator.measure.verify import Failure, spot_check
from ktlib_generator.values import Status

# The fastest single call may take this many times the timed median, and this much more for clock and call.
SLOWER_RATIO, SLOWER_US = 4.0, 5.0
# Rounds over all sets; more, up to the last number, while every call so far was too slow (a busy machine).
ROUNDS, MAX_ROUNDS = 2, 8
# Calls this long are judged by fewer.
LONG_CALL_US, LONG_MAX_ROUNDS = 200_000.0, 2
# On CUDA a sample may rotate over hundreds of sets: this many are drawn, unknown to the candidate. Large
# operands keep their contents there; their outputs are poisoned and checked all the same.
CUDA_SETS, CUDA_REFILL_BYTES = 4, 64 * 2**20


def fresh_seed() -> int:
    """A seed that nothing in this process could know before now; draw it after timing."""
    return int.from_bytes(os.urandom(6), "little")


def check(
    kernel: Candidate, sets: OperandSets, problem: Problem, arrays: Arrays, timed_us: float
) -> Failure | None:
    """Check every timed output, then give the sets new contents and call once on each, checked at once.

    CUDA is checked for results only, on a draw of the sets: no bound on time is known that holds there.
    """
    cpu = arrays.kind == "cpu"
    chosen = range(len(sets.own)) if cpu else _draw(len(sets.own))
    for i in chosen:
        wrong = spot_check(*sets.own[i], problem, arrays, fresh_seed())
        if wrong is not None:
            return Failure(f"after timing: {wrong}")
    allowed_us = SLOWER_RATIO * timed_us + SLOWER_US
    long = timed_us > LONG_CALL_US
    rounds, most = (1 if long or not cpu else ROUNDS), (LONG_MAX_ROUNDS if long else MAX_ROUNDS)
    fastest_us, done = float("inf"), 0
    while done < rounds or (cpu and fastest_us > allowed_us and done < most):
        done += 1
        for i in chosen:
            if cpu or _largest_bytes(problem) <= CUDA_REFILL_BYTES:
                sets.refill(i, fresh_seed())
        sets.poison()
        for i in chosen:
            fastest_us = min(fastest_us, _call_us(kernel, sets.own[i], arrays))
            wrong = spot_check(*sets.own[i], problem, arrays, fresh_seed())
            if wrong is not None:
                return Failure(f"after timing, new contents: {wrong}")
    if cpu and fastest_us > allowed_us:
        return Failure(
            f"after timing: {fastest_us:.4g} us at best on contents it had not seen, {timed_us:.4g} us when "
            f"timed (allowed: {allowed_us:.4g} us); the timed calls did not do the work",
            Status.REFUSED,
        )
    return None


def _draw(count: int) -> list[int]:
    return random.SystemRandom().sample(range(count), min(count, CUDA_SETS))


def _largest_bytes(problem: Problem) -> int:
    return max(problem.m, problem.n) * problem.k * ELEMENT_BYTES[problem.dtype]


def _call_us(kernel: Candidate, operands: OperandSet, arrays: Arrays) -> float:
    start = time.perf_counter_ns()
    kernel.run(*operands, arrays.stream())
    taken = time.perf_counter_ns() - start
    arrays.synchronize()
    return taken / 1000.0
