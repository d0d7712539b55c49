"""Exhaustive search: the whole space, each variant once.

Must not learn: the records it is told change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ktlib.problem import Problem
from ktlib_generator.search.strategy import stream_seed, untried
from ktlib_generator.values import Record, Variant


class Exhaustive:
    """Visits every variant once, in an order shuffled by the seed and shared by all problems.

    Sharing the order lets problems share binaries as early as possible: what the first problem
    compiled is what the second one asks for.
    """

    name = "exhaustive"

    def __init__(self) -> None:
        self._queue: list[Variant] = []

    def start(self, problem: Problem, space: Sequence[Variant], history: Sequence[Record], seed: int) -> None:
        """Begin a problem with everything its history lacks."""
        queue = untried(problem, space, history)
        # Sorted by a keyed hash rather than shuffled, so dropping what was tried does not move the rest.
        queue.sort(key=lambda variant: stream_seed("exhaustive", seed, variant=str(variant)))
        self._queue = queue[::-1]

    def ask(self, n: int) -> list[Variant]:
        """Take the next `n` of the order."""
        return [self._queue.pop() for _ in range(min(n, len(self._queue)))]

    def tell(self, record: Record) -> None:
        """Ignore the outcome: everything is visited anyway."""
