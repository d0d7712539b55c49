"""Which kernel the GPU tests force for which problem: every tile meets every layout, dtype and tail."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import ktlib
from ktlib import _core
from ktlib.problem import Problem
from ktlib_generator.families.sm90_tma import TILES, Sm90Tma
from ktlib_generator.values import Variant

EXTENTS = (64, 256, 1024, 4096)
FAMILY = Sm90Tma()


def variant_for(problem: Problem, number: int) -> Variant:
    """Spread the tiles over the problems, so that every tile meets every layout, dtype and tail."""
    tile = TILES[number % len(TILES)]
    return Variant.make(
        "sm90_tma",
        "sm90a",
        tile_m=tile.m,
        tile_n=tile.n,
        tile_k=64,
        num_stages=3 + number % 2,
        schedule=tile.schedule,
        group_m=(1, 4, 8)[number % 3],
        layout=problem.layout,
        dtype=problem.dtype,
    )


def forced_problems() -> Iterator[Problem]:
    """A grid that `near` covers densely: aligned operands, and an odd N under `nt` (C alone unaligned)."""
    for layout, dtype in itertools.product(("nn", "nt"), ("fp16", "bf16")):
        yield Problem(1, 64, 64, layout, dtype)
        for m, n, k in itertools.product(EXTENTS, repeat=3):
            yield Problem(m, n, k, layout, dtype)
            if layout == "nt":
                yield Problem(m, n - 3, k, layout, dtype)
                yield Problem(m, n, k, layout, dtype, align=2)


def use_only(path: Path) -> None:
    """Take this pack and no other: a shipped entry that is nearer would answer for the vendor."""
    ktlib.databases()
    assert not _core.set_packs([str(path)])
