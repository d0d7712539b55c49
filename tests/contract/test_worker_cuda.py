"""On a GPU: right CUDA candidates are measured; cheating and broken ones cost only themselves."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ktlib.canonical import bytes_fingerprint
from ktlib.problem import Problem
from ktlib_generator.measure.device import detect
from ktlib_generator.measure.worker import Job, Limits, Worker
from ktlib_generator.values import Binary, Status, Variant

ROOT = Path(__file__).parents[2]
CHEATS = ROOT / "tests" / "cheats" / "sm90"
# A GPU machine without nvcc uses what was compiled elsewhere and put here.
CUBINS = ROOT / "build" / "cheats_sm90"
PROBLEM = Problem(100, 72, 136, layout="nt")
LIMITS = Limits(wall_s=60.0)

pytestmark = pytest.mark.gpu


def facts(name):
    sys.path.insert(0, str(CHEATS))
    try:
        import facts as module
    finally:
        sys.path.remove(str(CHEATS))
    return module.facts(name)


def cubin(name):
    """Compile a candidate of tests/cheats/sm90, or take the one compiled before."""
    path = CUBINS / f"{name}.cubin"
    if shutil.which("nvcc"):
        CUBINS.mkdir(parents=True, exist_ok=True)
        include = str(ROOT / "csrc" / "kernels" / "sm90")
        flags = ["-cubin", "-arch=sm_90a", "-std=c++17", "-DNDEBUG", "-I", include]
        subprocess.run(["nvcc", *flags, CHEATS / f"{name}.cu", "-o", path], check=True)
    elif not path.exists():
        pytest.skip(f"needs nvcc, or {path} compiled elsewhere")
    data = path.read_bytes()
    return Binary("cubin", "candidate", bytes_fingerprint(data), name, 0, 0, 0, data)


def job(name, **changes):
    variant = Variant.make("sm90_tma", "sm90a", source=name)
    made = Job(PROBLEM, variant, facts(name), cubin(name), "graph-hot", seed=29)
    return dataclasses.replace(made, **changes)


@pytest.fixture(scope="module")
def worker():
    device = detect()
    if device.arch != "sm90a":
        pytest.skip(f"the candidates are compiled for sm90a, this is {device.arch}")
    with Worker(device, LIMITS) as worker:
        yield worker


@pytest.mark.parametrize("protocol", ["graph-hot", "graph-cold", "stream"])
def test_right_candidate_is_measured_under_every_protocol(worker, protocol):
    outcome = worker.run(job("honest", protocol=protocol))
    assert outcome.status is Status.OK, outcome.log
    assert outcome.verification.rms_ratio <= 1.03
    assert "stream" in outcome.verification.checks
    assert outcome.measurement.protocol == outcome.baseline.protocol == protocol
    assert 0.5 < outcome.measurement.latency_us < 1000


@pytest.mark.parametrize("shape", [(1, 8, 8), (16, 9, 64), (33, 257, 72), (512, 512, 512)])
def test_right_candidate_is_accepted_at_tails_and_odd_columns(worker, shape):
    outcome = worker.run(job("honest", problem=Problem(*shape, layout="nt")))
    assert outcome.status is Status.OK, outcome.log


@pytest.mark.parametrize("method", ["torch", "cublaslt_heuristic"])
@pytest.mark.parametrize("shape", [(256, 256, 256), (129, 77, 1001), (64, 64, 16384)])
def test_vendor_with_fp32_reduction_passes_every_rule(worker, method, shape):
    """The rules must not refuse what is right; odd shapes are where torch's default would sum in fp16."""
    variant = Variant.make("vendor", "sm90a", method=method)
    outcome = worker.run(job("honest", problem=Problem(*shape), variant=variant, binary=None, facts=None))
    assert outcome.status is Status.OK, outcome.log


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("out_of_bounds", Status.WRONG_RESULT, "out of bounds"),
        ("stale", Status.WRONG_RESULT, "wrong"),
        ("wild_write", Status.LAUNCH_ERROR, "illegal"),
    ],
)
def test_cheat_gets_its_status_and_the_next_is_measured(worker, name, status, text):
    outcome = worker.run(job(name))
    assert outcome.status is status, outcome
    assert text in outcome.log
    assert worker.run(job("honest")).status is Status.OK


def test_three_broken_among_twenty_cost_only_themselves():
    names = ["honest"] * 17
    for position, name in ((2, "out_of_bounds"), (9, "hang"), (15, "stale")):
        names.insert(position, name)
    with Worker(detect(), dataclasses.replace(LIMITS, wall_s=15.0)) as worker:
        outcomes = [worker.run(job(name)) for name in names]
        assert worker.starts == 2
    statuses = [outcome.status for outcome in outcomes]
    assert statuses.count(Status.OK) == 17, [outcome.log for outcome in outcomes]
    assert statuses[2] is statuses[15] is Status.WRONG_RESULT
    assert statuses[9] is Status.TIMEOUT


def on_stream(choose):
    """A right product by torch, enqueued on the stream that `choose` returns for the caller's."""
    import torch

    def run(a, b, c, stream):
        caller = torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()
        with torch.cuda.stream(choose(torch, caller)):
            torch.matmul(a.logical, b.logical, out=c.logical)

    return run


def right_stream(torch, caller):
    return caller


def own_stream(torch, caller):
    """Work the caller cannot wait for. Uses the default stream, so that only the order check can see it."""
    return torch.cuda.default_stream()


def waits_first(torch, caller):
    caller.synchronize()
    return caller


@pytest.mark.parametrize(
    ("choose", "text"),
    [(right_stream, None), (own_stream, "before the caller's stream"), (waits_first, "waited")],
)
def test_only_the_callers_stream_may_be_used_and_never_waited_for(choose, text):
    pytest.importorskip("torch")
    from ktlib_generator.measure.arrays import TorchArrays
    from ktlib_generator.measure.baselines import require_fp32_reduction
    from ktlib_generator.measure.verify import Failure, verify

    arrays = TorchArrays()
    require_fp32_reduction(arrays.xp)
    result = verify(on_stream(choose), PROBLEM, arrays, seed=4)
    if text is None:
        assert not isinstance(result, Failure), result
    else:
        assert isinstance(result, Failure)
        assert result.status is Status.REFUSED
        assert text in result.reason
