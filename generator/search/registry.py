"""Every search strategy, in one visible tuple; adding one is adding a line here."""

from __future__ import annotations

from collections.abc import Callable

from ktlib_generator.search.exhaustive import Exhaustive
from ktlib_generator.search.random_search import RandomSearch
from ktlib_generator.search.strategy import Strategy

STRATEGIES: tuple[Callable[[], Strategy], ...] = (Exhaustive, RandomSearch)


def strategy_names() -> tuple[str, ...]:
    """Return the names that `strategy` accepts."""
    return tuple(make().name for make in STRATEGIES)


def strategy(name: str) -> Strategy:
    """Return a fresh strategy by name.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    for make in STRATEGIES:
        made = make()
        if made.name == name:
            return made
    raise ValueError(f"strategy {name!r} is unknown (have: {', '.join(strategy_names())})")
