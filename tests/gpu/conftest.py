"""Fixtures of the GPU tests: a Hopper GPU, and a pack that makes our kernels run rather than the vendor's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from ktlib.problem import Problem
from ktlib_generator.build import nvcc
from ktlib_generator.families.sm90_tma import TILES, Sm90Tma
from ktlib_generator.pack import write_pack
from ktlib_generator.values import Binary, Environment, Measurement, Record, Status, Variant

EXTENTS = (64, 256, 1024, 4096)
FAMILY = Sm90Tma()


@pytest.fixture(scope="session")
def torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU that torch can use")
    return torch


@pytest.fixture(scope="session")
def device(torch):
    from ktlib_generator.measure.device import detect

    return detect()


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
        for m, n, k in itertools.product(EXTENTS, repeat=3):
            yield Problem(m, n, k, layout, dtype)
            if layout == "nt":
                yield Problem(m, n - 3, k, layout, dtype)
                yield Problem(m, n, k, layout, dtype, align=2)


@pytest.fixture(scope="session")
def kernels_run(torch, device, tmp_path_factory) -> Path:
    """Load a pack in which a kernel of ours won everywhere; its times are made up, nothing reads them."""
    import concurrent.futures

    import ktlib

    environment = Environment(device.name, device.arch, device.sm_count, "test", False)
    chosen = [(p, variant_for(p, i // 2 + i % 2)) for i, p in enumerate(dict.fromkeys(forced_problems()))]
    requests = {FAMILY.build_request(v).symbol: FAMILY.build_request(v) for _, v in chosen}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        built = dict(
            zip(
                requests,
                pool.map(lambda r: nvcc.compile_cubin(r, timeout_s=120), requests.values()),
                strict=True,
            )
        )
    assert all(isinstance(b, Binary) for b in built.values()), built
    records = [
        Record(
            problem,
            variant,
            environment,
            Status.OK,
            0,
            Measurement("sm90_tma", "graph-hot", (1.0,)),
            Measurement("torch", "graph-hot", (2.0,)),
            binary=built[FAMILY.build_request(variant).symbol],
        )
        for problem, variant in chosen
    ]
    path = tmp_path_factory.mktemp("packs") / "forced.ktpack"
    write_pack(path, records, {b.sha256: b.data for b in built.values()}, device)
    ktlib.load_database(str(path))
    return path
