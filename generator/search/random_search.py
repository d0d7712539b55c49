"""Random search: uniform draws without repeats, another sequence for every problem.

Must not learn: it is the strategy that every other one has to beat.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ktlib.problem import Problem
from ktlib_generator.search.strategy import stream_seed, untried
from ktlib_generator.values import Record, Variant


class RandomSearch:
    """Draws variants uniformly until the space is used up or the budget ends.

    Each problem has its own sequence, so a few trials on each of many problems see the whole space.
    """

    name = "random"

    def __init__(self) -> None:
        self._left: list[Variant] = []
        self._random = random.Random(0)

    def start(self, problem: Problem, space: Sequence[Variant], history: Sequence[Record], seed: int) -> None:
        """Begin a problem; a resumed search goes on with a sequence of its own."""
        self._left = untried(problem, space, history)
        tried = str(len(space) - len(self._left))
        self._random = random.Random(stream_seed("random", seed, problem=str(problem), tried=tried))

    def ask(self, n: int) -> list[Variant]:
        """Draw at most `n` variants."""
        drawn: list[Variant] = []
        while self._left and len(drawn) < n:
            index = self._random.randrange(len(self._left))
            # Constant-time removal; the order of what is left carries no meaning.
            self._left[index], self._left[-1] = self._left[-1], self._left[index]
            drawn.append(self._left.pop())
        return drawn

    def tell(self, record: Record) -> None:
        """Ignore the outcome: draws are independent of it."""
