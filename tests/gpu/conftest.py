"""Fixtures of the GPU tests: a Hopper GPU, and a pack that makes our kernels run rather than the vendor's."""

from __future__ import annotations

from pathlib import Path

import pytest
from forced import FAMILY, forced_problems, use_only, variant_for

from ktlib_generator.build import nvcc
from ktlib_generator.pack import write_pack
from ktlib_generator.values import Binary, Environment, Measurement, Record, Status


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


@pytest.fixture(scope="session")
def kernels_run(torch, device, tmp_path_factory) -> Path:
    """Load a pack in which a kernel of ours won everywhere; its times are made up, nothing reads them."""
    import concurrent.futures

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
    use_only(path)
    return path
