"""The worker's promises: a broken or cheating candidate costs one record with its status, never the run."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ktlib import _core
from ktlib.canonical import bytes_fingerprint
from ktlib.problem import Problem
from ktlib_generator.families.base import Device, LaunchParameters
from ktlib_generator.measure.worker import Job, Limits, Worker, WorkerError
from ktlib_generator.values import Binary, Status, Variant

CHEATS = Path(__file__).parents[1] / "cheats"
ARCH = _core.cpu_archs()[0]
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

    def build(name, *flags):
        key = (name, *flags)
        if key not in built:
            out = folder / f"{name}-{len(built)}.so"
            subprocess.run(
                [
                    "g++",
                    "-std=c++17",
                    "-O1",
                    "-shared",
                    "-fPIC",
                    "-pthread",
                    *flags,
                    "-o",
                    out,
                    CHEATS / f"{name}.cpp",
                ],
                check=True,
            )
            data = out.read_bytes()
            built[key] = Binary("shared_object", "candidate", bytes_fingerprint(data), name, 0, 0, 0, data)
        return built[key]

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
    for config in _core.cpu_kernels():
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
    ("memo_sample", PROBLEM, Status.REFUSED, "contents it had not seen"),
    ("poison", PROBLEM, Status.REFUSED, "contents it had not seen"),
    ("one_set", PROBLEM, Status.WRONG_RESULT, "after timing"),
    ("late_thread", PROBLEM, Status.REFUSED, "after timing: threads"),
    ("sigalarm", PROBLEM, Status.REFUSED, "SIGALRM"),
    ("flushes_denormals", PROBLEM, Status.REFUSED, "floating point"),
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
        assert worker.starts == 4  # each shared object costs its process, a built-in candidate none
    statuses = [outcome.status for outcome in outcomes]
    assert statuses.count(Status.OK) == 17, [outcome.log for outcome in outcomes]
    assert statuses[2] is Status.WRONG_RESULT
    assert statuses[15] is Status.WRONG_RESULT
    assert statuses[9] is Status.TIMEOUT
    assert "3 s" in outcomes[9].log


@pytest.mark.parametrize("name", ["rounds_to_zero", "flushes_denormals"])
def test_what_a_candidate_did_to_its_process_does_not_reach_the_next(worker, shared_object, name):
    assert worker.run(job(shared_object(name), name)).status is not Status.OK
    outcome = worker.run(builtin_jobs(1)[0])
    assert outcome.status is Status.OK, outcome.log


def test_process_in_a_session_of_its_own_ends_with_the_candidate(shared_object, monkeypatch):
    run = f"TEST_RUN={os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv(*run.split("="))
    with Worker(DEVICE, LIMITS) as worker:
        assert worker.run(job(shared_object("forks"), "forks")).status is Status.OK
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    assert [pid for pid in pids if alive(pid) and maps_candidate(pid, run)] == []


def maps_candidate(pid, run):
    """Whether a process holds a candidate's shared object and has `run` in its environment."""
    try:
        mapped = "ktlib-candidate-" in Path(f"/proc/{pid}/maps").read_text()
        return mapped and run.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def plausible_answer():
    """What an honest process would answer to the first job."""
    taken = {"method": "ktlib_own", "protocol": "cpu-stream", "samples_us": [90.0, 91.0, 92.0]}
    return {
        "job": 1,
        "spoilt": False,
        "status": "ok",
        "log": "",
        "measurement": taken,
        "baseline": {**taken, "method": "numpy"},
        "verification": {"rms_ratio": 1.0, "checks": ["guards"]},
    }


def framed(text, blob_bytes=0):
    return struct.pack("<4sIQ", b"KTMF", len(text), blob_bytes) + text.encode()


def forged(**changes):
    return framed(json.dumps({**plausible_answer(), **changes}))


def forged_samples(text):
    return framed(json.dumps(plausible_answer()).replace("[90.0, 91.0, 92.0]", text))


FORGED = {
    "integer_beyond_floats": forged_samples(f"[{10**400}]"),
    "integer_beyond_python": forged_samples("1" * 10_000),
    "samples_that_sum_to_infinity": forged_samples("[1.7e308, 1.7e308]"),
    "nested_too_deeply": framed("[" * 200_000),
    "not_an_object": framed("5"),
    "not_json": framed("{"),
    "not_a_message": b"\xff" * 64,
    "endless_blob": framed("{}", 2**30),
    "log_is_a_number": forged(log=5),
    "status_is_a_list": forged(status=["ok"]),
    "unknown_status": forged(status="fine"),
    "measurement_is_a_number": forged(measurement=5),
    "ok_without_a_measurement": forged(measurement=None),
    "ok_without_a_verification": forged(verification=None),
    "measurement_of_a_failure": forged(status="wrong_result"),
    "another_job": forged(job=2),
    "another_protocol": forged(measurement={**plausible_answer()["measurement"], "protocol": "cpu-loop"}),
    "impossible_speed": forged(measurement={**plausible_answer()["measurement"], "samples_us": [1e-5]}),
    "impossible_baseline": forged(baseline={**plausible_answer()["baseline"], "samples_us": [1e-5]}),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_answer_is_refused_and_the_run_goes_on(shared_object, tmp_path, name):
    path = tmp_path / "forged"
    path.write_bytes(FORGED[name])
    with Worker(DEVICE, dataclasses.replace(LIMITS, wall_s=5.0)) as worker:
        outcome = worker.run(job(shared_object("forges_answer", f'-DFORGED="{path}"'), "forges_answer"))
        assert outcome.status is Status.REFUSED, outcome
        assert "false answer" in outcome.log
        assert outcome.measurement is outcome.baseline is None
        if name == "nested_too_deeply":
            assert worker.run(builtin_jobs(1)[0]).status is Status.OK


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


@pytest.mark.parametrize("size", [37, 512])  # the larger one starts the library's threads
@pytest.mark.parametrize("method", ["numpy", "torch"])
def test_vendor_routine_is_a_candidate_like_any_other(worker, method, size):
    if method == "torch":
        pytest.importorskip("torch")
    variant = Variant.make("vendor", ARCH, method=method)
    made = job(None, "vendor", Problem(size, size, size, dtype="fp32"), seed=19)
    outcome = worker.run(dataclasses.replace(made, variant=variant))
    assert outcome.status is Status.OK, outcome.log
    assert outcome.measurement.method == method
    assert outcome.baseline is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"binary": None}, "has no binary"),
        ({"protocol": "graph-hot"}, "cpu-stream, cpu-loop"),
    ],
)
def test_job_that_cannot_be_run_says_why_and_the_worker_lives(worker, changes, text):
    (honest,) = builtin_jobs(1)
    outcome = worker.run(dataclasses.replace(honest, **changes))
    starts = worker.starts
    assert outcome.status is Status.LAUNCH_ERROR
    assert text in outcome.log
    assert worker.run(honest).status is Status.OK
    assert worker.starts == starts


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
