"""The worker's promises: a broken or cheating candidate costs one record with its status, never the run."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ktlib.canonical import bytes_fingerprint
from ktlib.problem import Problem
from ktlib_generator.families.base import Device, LaunchParameters
from ktlib_generator.measure.worker import Job, Limits, Worker, WorkerError
from ktlib_generator.values import Binary, Status, Variant

core = pytest.importorskip("ktlib._core", reason="the extension is not built")
CHEATS = Path(__file__).parents[1] / "cheats"
ARCH = core.cpu_archs()[0]
DEVICE = Device("cpu", "this CPU", ARCH, len(os.sched_getaffinity(0)))
# Tails in every extent, and small: verification of one candidate takes a few milliseconds.
PROBLEM = Problem(37, 50, 33, layout="nt", dtype="fp32")
HALF = Problem(37, 50, 100, layout="nt", dtype="fp16")
LIMITS = Limits(wall_s=20.0, memory_bytes=2 * 2**30, output_bytes=2**18)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="candidates are compiled with g++")


@pytest.fixture(scope="session")
def shared_object(tmp_path_factory):
    """Compile a candidate of tests/cheats once and return it as a Binary."""
    built = {}
    folder = tmp_path_factory.mktemp("cheats")

    def build(name):
        if name not in built:
            out = folder / f"{name}.so"
            subprocess.run(
                [
                    "g++",
                    "-std=c++17",
                    "-O1",
                    "-shared",
                    "-fPIC",
                    "-pthread",
                    "-o",
                    out,
                    CHEATS / f"{name}.cpp",
                ],
                check=True,
            )
            data = out.read_bytes()
            built[name] = Binary("shared_object", "candidate", bytes_fingerprint(data), name, 0, 0, 0, data)
        return built[name]

    return build


@pytest.fixture(scope="module")
def worker():
    with Worker(DEVICE, LIMITS) as worker:
        yield worker


def job(binary, name, problem=PROBLEM, **changes):
    variant = Variant.make("foreign", ARCH, source=name, dtype=problem.dtype)
    fields = {
        "facts": None,
        "binary": binary,
        "protocol": "cpu-stream",
        "launch": LaunchParameters(),
        "seed": 17,
    }
    return Job(problem=problem, variant=variant, **(fields | changes))


def builtin_jobs(count, **changes):
    """Candidates compiled into the extension, every one right."""
    jobs = []
    for config in core.cpu_kernels():
        if config["dtype"] == PROBLEM.dtype and len(jobs) < count:
            variant = Variant.make("cpu_gemm", ARCH, **config)
            binary = Binary("builtin", "", bytes_fingerprint(b""), str(variant), 0, 0, 0)
            jobs.append(dataclasses.replace(job(binary, "builtin"), variant=variant, **changes))
    return jobs


def process_state(pid):
    """State letter and parent of a process; "X" when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[1])


def alive(pid):
    return process_state(pid)[0] not in "XZ"


def child_processes(parent):
    """Living processes whose parent is `parent`."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if process_state(pid)[1] == parent and alive(pid)]


@pytest.mark.parametrize(("name", "problem"), [("honest", PROBLEM), ("honest_fp16", HALF)])
def test_right_candidate_is_measured_next_to_a_baseline(worker, shared_object, name, problem):
    outcome = worker.run(job(shared_object(name), name, problem))
    assert outcome.status is Status.OK, outcome.log
    assert outcome.measurement.protocol == outcome.baseline.protocol == "cpu-stream"
    assert len(outcome.measurement.samples_us) == len(outcome.baseline.samples_us) >= 5
    assert outcome.measurement.latency_us < 1e5
    assert outcome.baseline.method in ("numpy", "torch")
    assert {"zero_one", "special", "repeat", "guards", "threads"} <= set(outcome.verification.checks)


CHEATING = [
    ("out_of_bounds", PROBLEM, Status.WRONG_RESULT, "out of bounds"),
    ("stale", PROBLEM, Status.WRONG_RESULT, "wrong"),
    ("stale_by_address", PROBLEM, Status.WRONG_RESULT, "wrong"),
    ("changes_inputs", PROBLEM, Status.WRONG_RESULT, "input A was changed"),
    ("fp16_accumulate", HALF, Status.WRONG_RESULT, "wrong"),
    ("skips_tail", PROBLEM, Status.WRONG_RESULT, "NaN or Inf"),
    ("first_calls_only", PROBLEM, Status.WRONG_RESULT, "after timing"),
    ("no_op", PROBLEM, Status.WRONG_RESULT, "NaN or Inf"),
    ("reads_beside", PROBLEM, Status.WRONG_RESULT, "NaN or Inf"),
    ("leaves_thread", PROBLEM, Status.REFUSED, "threads"),
    ("segfault", PROBLEM, Status.LAUNCH_ERROR, "SIGSEGV"),
    ("endless_output", PROBLEM, Status.REFUSED, "printed more than"),
    ("endless_memory", PROBLEM, Status.LAUNCH_ERROR, ""),
]


@pytest.mark.parametrize(("name", "problem", "status", "text"), CHEATING, ids=[row[0] for row in CHEATING])
def test_cheat_gets_its_status(worker, shared_object, name, problem, status, text):
    if name == "reads_beside":
        problem = dataclasses.replace(problem, layout="nn")
    outcome = worker.run(job(shared_object(name), name, problem))
    assert outcome.status is status, outcome
    assert text in outcome.log
    assert outcome.measurement is None
    assert outcome.log


def test_three_broken_among_twenty_cost_only_themselves(shared_object):
    jobs = builtin_jobs(17, seed=5)
    while len(jobs) < 17:
        jobs.append(job(shared_object("honest"), "honest", seed=5))
    for position, name in ((2, "out_of_bounds"), (9, "hang"), (15, "stale")):
        jobs.insert(position, job(shared_object(name), name, seed=5))
    with Worker(DEVICE, dataclasses.replace(LIMITS, wall_s=3.0)) as worker:
        outcomes = [worker.run(each) for each in jobs]
        assert worker.starts == 2  # only the hang costs the process
    statuses = [outcome.status for outcome in outcomes]
    assert statuses.count(Status.OK) == 17, [outcome.log for outcome in outcomes]
    assert statuses[2] is Status.WRONG_RESULT
    assert statuses[15] is Status.WRONG_RESULT
    assert statuses[9] is Status.TIMEOUT
    assert "3 s" in outcomes[9].log


def test_time_limit_reaches_the_candidate(shared_object):
    start, others = time.monotonic(), child_processes(os.getpid())
    with Worker(DEVICE, dataclasses.replace(LIMITS, wall_s=1.0)) as worker:
        assert worker.run(job(shared_object("hang"), "hang")).status is Status.TIMEOUT
        assert time.monotonic() - start < 15.0
        assert child_processes(os.getpid()) == others


def test_same_candidate_first_and_last_is_within_reason(worker):
    """The same kernel early and late in a run: interleaving with the baseline must keep their ratio."""
    first, *others = builtin_jobs(6, seed=8)
    ratios = []
    for each in (first, *others, first):
        outcome = worker.run(each)
        ratios.append(outcome.baseline.latency_us / outcome.measurement.latency_us)
    assert 0.4 < ratios[0] / ratios[-1] < 2.5  # a shared machine; a throttled clock would not change it


def test_loop_protocol_times_the_kernel_without_python(worker):
    stream, loop = (
        worker.run(
            dataclasses.replace(builtin_jobs(1)[0], problem=Problem(8, 16, 8, dtype="fp32"), protocol=p)
        )
        for p in ("cpu-stream", "cpu-loop")
    )
    assert loop.measurement.latency_us < stream.measurement.latency_us
    assert loop.baseline.protocol == "cpu-stream"


def test_vendor_routine_is_a_candidate_like_any_other(worker):
    outcome = worker.run(
        dataclasses.replace(job(None, "vendor"), variant=Variant.make("vendor", ARCH, method="numpy"))
    )
    assert outcome.status is Status.OK, outcome.log
    assert outcome.measurement.method == "numpy"
    assert outcome.baseline is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"binary": None}, "has no binary"),
        ({"protocol": "graph-hot"}, "cpu-stream, cpu-loop"),
    ],
)
def test_job_that_cannot_be_run_says_why_and_the_worker_lives(worker, shared_object, changes, text):
    starts = worker.starts
    outcome = worker.run(dataclasses.replace(job(shared_object("honest"), "honest"), **changes))
    assert outcome.status is Status.LAUNCH_ERROR
    assert text in outcome.log
    assert worker.run(job(shared_object("honest"), "honest")).status is Status.OK
    assert worker.starts <= starts + 1


def test_missing_symbol_is_named(worker, shared_object):
    binary = dataclasses.replace(shared_object("honest"), symbol="absent")
    outcome = worker.run(job(binary, "honest"))
    assert outcome.status is Status.LAUNCH_ERROR
    assert "absent" in outcome.log


@pytest.mark.parametrize("shape", [(0, 4, 4), (4, 4, 0)])
def test_empty_problem_is_refused_before_a_launch(shape):
    with pytest.raises(ValueError, match="empty or batched"):
        job(None, "none", Problem(*shape, dtype="fp32"))


def test_device_that_is_not_there_is_not_blamed_on_a_candidate(shared_object):
    nowhere = Device("cuda", "no such GPU", "sm90a", 132)
    try:
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
    except ImportError:
        pass
    with pytest.raises(WorkerError, match="no such GPU"), Worker(nowhere, LIMITS) as worker:
        worker.run(job(shared_object("honest"), "honest"))


HANGING_RUN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts with `&`
sys.path.insert(0, {folder!r})
import test_worker as t
from ktlib.canonical import bytes_fingerprint
from ktlib_generator.measure.worker import Worker
data = open({path!r}, "rb").read()
binary = t.Binary("shared_object", "candidate", bytes_fingerprint(data), "hang", 0, 0, 0, data)
with Worker(t.DEVICE, t.Limits(wall_s=60.0)) as worker:
    print("running", flush=True)
    worker.run(t.job(binary, "hang"))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl_c", "killed"])
def test_ending_the_parent_leaves_no_child(shared_object, tmp_path, number):
    path = tmp_path / "hang.so"
    path.write_bytes(shared_object("hang").data)
    script = HANGING_RUN.format(folder=str(Path(__file__).parent), path=str(path))
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert parent.stdout.readline() == b"running\n"
        deadline = time.monotonic() + 20.0
        children = []
        while not children and time.monotonic() < deadline:
            children = child_processes(parent.pid)
            time.sleep(0.05)
        time.sleep(1.5)  # into the candidate's loop
        assert children
        parent.send_signal(number)
        parent.wait(10.0)
        deadline = time.monotonic() + 5.0
        while any(map(alive, children)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [pid for pid in children if alive(pid)] == []
    finally:
        parent.kill()
        parent.communicate()
