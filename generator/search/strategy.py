"""What a search strategy is: it proposes variants and learns from records.

Must not build, time or store anything, and must not look at the machine it runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ktlib.canonical import fingerprint
from ktlib.problem import Problem
from ktlib_generator.values import Record, Variant


class Strategy(Protocol):
    """Proposes trials for one problem at a time; the loop owns building, timing and budgets.

    Duties of a strategy:

    - Every variant it proposes is one of `space`, and none is proposed twice, nor one that a record in
      `history` has for the same problem.
    - `ask` never blocks and never returns more than it was asked for. It may be called while earlier
      proposals are still untold, because the next batch compiles while this one is measured. An empty
      answer means "nothing until you tell me more"; with nothing left untold it ends the search.
    - The same space, history, seed and order of calls give the same proposals.
    - The order is randomised by the seed, so that a clock which drifts over the run favours no corner.
    - A failure is a record with another status than `ok`: information, never an exception. A strategy
      goes on, and ends, even when every record is a failure.

    Duties of the loop: `start` comes first and again for each problem; `tell` gets one record for each
    proposal it finished, in the order they finished. Proposals may stay untold when a budget ends.
    """

    name: str

    def start(self, problem: Problem, space: Sequence[Variant], history: Sequence[Record], seed: int) -> None:
        """Begin a problem. `history` may hold other problems' records; those of this one count as told."""
        ...

    def ask(self, n: int) -> list[Variant]:
        """Propose at most `n` variants, most promising first."""
        ...

    def tell(self, record: Record) -> None:
        """Learn the outcome of one proposal."""
        ...


def untried(problem: Problem, space: Sequence[Variant], history: Sequence[Record]) -> list[Variant]:
    """Return the space without the variants that `history` has for `problem`, in the space's order."""
    tried = {record.variant for record in history if record.problem == problem}
    return [variant for variant in dict.fromkeys(space) if variant not in tried]


def stream_seed(kind: str, seed: int, **fields: str) -> int:
    """Return the seed of one random stream, so that two strategies or problems never share draws."""
    return int(fingerprint(kind=kind, seed=seed, **fields)[:16], 16)
