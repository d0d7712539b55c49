"""The duties of search/strategy.py, run over every strategy of the registry on recorded times.

The times are a made-up but smooth table over the CPU family's axes, so that a strategy that learns has
something to learn; no kernel runs.
"""

from __future__ import annotations

import itertools
import math

import pytest

from ktlib.problem import Problem
from ktlib_generator.search.registry import STRATEGIES, strategy, strategy_names
from ktlib_generator.values import Environment, Measurement, Record, Status, Variant

ARCH = "cpu-x86_64_v3"
PROBLEM = Problem(64, 64, 64, dtype="fp32")
OTHER = Problem(128, 64, 64, dtype="fp32")
ENVIRONMENT = Environment(device="table", arch=ARCH, sm_count=2, commit="0" * 40, dirty=False)
SPACE = [
    Variant.make("cpu_gemm", ARCH, tile_m=m, tile_n=n, unroll=u, loop=loop)
    for m, n, u, loop in itertools.product((1, 2, 4, 8), (8, 16, 32), (1, 2, 4), ("mn", "nm"))
]


def recorded_us(variant: Variant) -> float:
    """The table: best at tile_m=4, tile_n=16, unroll=2."""
    distance = (
        abs(math.log2(variant.integer("tile_m") / 4))
        + abs(math.log2(variant.integer("tile_n") / 16))
        + abs(math.log2(variant.integer("unroll") / 2))
    )
    return 10.0 * (1.0 + 0.2 * distance)


def replay(variant: Variant, problem: Problem = PROBLEM, *, fails: bool = False) -> Record:
    """Return the record that the table holds for a variant."""
    if fails:
        return Record(problem, variant, ENVIRONMENT, Status.BUILD_ERROR, 0, log="recorded failure")
    measurement = Measurement("cpu_gemm", "loop", (recorded_us(variant),))
    return Record(problem, variant, ENVIRONMENT, Status.OK, 0, measurement=measurement)


def drive(name: str, *, seed=1, batch=5, fails=None, history=(), problem=PROBLEM, limit=10_000):
    """Run one strategy as the loop does: ask for the next batch before the last one is told."""
    subject = strategy(name)
    subject.start(problem, SPACE, history, seed)
    proposed: list[Variant] = []
    waiting = subject.ask(batch)
    while waiting:
        assert len(proposed) < limit, f"{name} goes on for ever"
        ahead = subject.ask(batch)
        for variant in waiting:
            proposed.append(variant)
            subject.tell(replay(variant, problem, fails=bool(fails and fails(variant))))
        waiting = ahead or subject.ask(batch)
    return proposed


@pytest.fixture(params=strategy_names())
def name(request):
    return request.param


def test_proposes_only_from_the_space_and_nothing_twice(name):
    proposed = drive(name)
    assert proposed
    assert set(proposed) <= set(SPACE)
    assert len(set(proposed)) == len(proposed)


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_ends_and_never_gives_more_than_asked(name, batch):
    subject = strategy(name)
    subject.start(PROBLEM, SPACE, (), 3)
    total = 0
    while asked := subject.ask(batch):
        assert len(asked) <= batch
        total += len(asked)
        for variant in asked:
            subject.tell(replay(variant))
    assert 0 < total <= len(SPACE)
    assert subject.ask(batch) == []


def test_same_seed_same_order_and_another_seed_another_order(name):
    assert drive(name, seed=5) == drive(name, seed=5)
    assert drive(name, seed=5) != drive(name, seed=6)


def test_order_is_not_that_of_the_space(name):
    """A drifting clock must not favour one corner: neighbours in the space are not tried in a row."""
    position = {variant: index for index, variant in enumerate(SPACE)}
    visited = [position[variant] for variant in drive(name)]
    in_a_row = sum(b == a + 1 for a, b in itertools.pairwise(visited))
    assert in_a_row < len(visited) / 4


def test_survives_records_that_all_fail(name):
    proposed = drive(name, fails=lambda variant: True)
    assert proposed
    assert len(set(proposed)) == len(proposed)


def test_survives_a_mix_of_failures_and_still_ends(name):
    proposed = drive(name, fails=lambda variant: variant["loop"] == "nm")
    assert any(variant["loop"] == "mn" for variant in proposed)


def test_never_proposes_what_the_history_has_for_this_problem(name):
    made = [replay(variant) for variant in SPACE[::2]]
    made += [replay(SPACE[1], fails=True)]
    proposed = drive(name, history=made)
    assert proposed
    assert not set(proposed) & {record.variant for record in made}


def test_history_of_another_problem_forbids_nothing(name):
    """Another problem's records may teach, but its variants are still to be tried here."""
    space = SPACE[:3]
    subject = strategy(name)
    subject.start(PROBLEM, space, [replay(variant, OTHER) for variant in space], 1)
    assert set(subject.ask(3)) == set(space)


def test_start_forgets_the_problem_before(name):
    subject = strategy(name)
    subject.start(PROBLEM, SPACE, (), 1)
    subject.ask(10)
    subject.start(OTHER, SPACE, (), 1)
    again = list(itertools.chain.from_iterable(iter(lambda: subject.ask(50), [])))
    fresh = strategy(name)
    fresh.start(OTHER, SPACE, (), 1)
    assert again == list(itertools.chain.from_iterable(iter(lambda: fresh.ask(50), [])))


def test_an_empty_space_and_a_fully_tried_one_propose_nothing(name):
    subject = strategy(name)
    subject.start(PROBLEM, [], (), 1)
    assert subject.ask(5) == []
    subject.start(PROBLEM, SPACE, [replay(variant) for variant in SPACE], 1)
    assert subject.ask(5) == []


def test_exhaustive_visits_everything_and_shares_its_order_between_problems():
    first = drive("exhaustive")
    assert set(first) == set(SPACE)
    assert drive("exhaustive", problem=OTHER) == first


def test_random_has_another_sequence_for_every_problem():
    assert drive("random")[:10] != drive("random", problem=OTHER)[:10]


def test_registry_names_are_unique_and_an_unknown_one_lists_them():
    assert len(set(strategy_names())) == len(STRATEGIES)
    with pytest.raises(ValueError, match=r"'lfbo2' is unknown \(have: exhaustive, random"):
        strategy("lfbo2")
