"""The CUDA protocols against a made-up device clock: what is captured, replayed, flushed and divided by."""

from __future__ import annotations

import contextlib
import types

import pytest

from ktlib.problem import Problem
from ktlib_generator.families.base import Device
from ktlib_generator.measure import cuda_timer, timer
from ktlib_generator.measure.arrays import NumpyArrays
from ktlib_generator.measure.timer import Timer

GPU = Device("cuda", "a GPU", "sm90a", 132, 232448, 2**20)


class FakeCuda:
    """Device time advances by what is enqueued; a capture collects instead."""

    def __init__(self):
        self.now_us = 0.0
        self.capturing = None
        self.stack = [types.SimpleNamespace(cuda_stream=0)]
        self.replays = 0
        self.captured = []
        fake = self

        class Stream:
            cuda_stream = 77

            def synchronize(self):
                pass

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self):
                assert fake.stack[-1].cuda_stream == 77, "recorded on another stream than the work's"
                self.at = fake.now_us

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return (end.at - self.at) / 1000.0

        class CUDAGraph:
            def capture_begin(self, capture_error_mode):
                assert capture_error_mode == "relaxed"
                assert fake.stack[-1].cuda_stream == 77
                self.work = fake.capturing = []

            def capture_end(self):
                fake.capturing = None
                fake.captured.append(len(self.work))

            def replay(self):
                fake.replays += 1
                fake.now_us += sum(self.work)

        self.Stream, self.Event, self.CUDAGraph = Stream, Event, CUDAGraph

    @contextlib.contextmanager
    def stream(self, stream):
        self.stack.append(stream)
        yield
        self.stack.pop()

    def _sleep(self, cycles):
        assert self.capturing is None

    def enqueue(self, us):
        if self.capturing is None:
            self.now_us += us
        else:
            self.capturing.append(us)


class Kernel:
    native = False
    method = "torch"

    def __init__(self, cuda, us):
        self.cuda, self.us, self.operands = cuda, us, []

    def run(self, a, b, c, stream):
        assert stream == 77
        self.operands.append((a.address, c.address))
        self.cuda.enqueue(self.us * (1 + len(self.operands) % 3 * 0.01))


class CudaNumpy(NumpyArrays):
    """NumPy memory standing for the device's; counts how often the flush buffer is written."""

    kind = "cuda"

    def __init__(self):
        self.flushes = 0

    def buffer(self, count):
        import numpy as np

        arrays = self

        class Flushed(np.ndarray):
            def zero_(self):
                arrays.flushes += 1

        return super().buffer(count).view(Flushed)


@pytest.fixture
def rig(monkeypatch):
    cuda = FakeCuda()
    torch = types.SimpleNamespace(cuda=cuda)
    monkeypatch.setattr(cuda_timer, "torch_module", lambda: torch)
    vendor = Kernel(cuda, 8.0)
    monkeypatch.setattr(timer, "baselines", lambda problem, kind: (vendor,))
    return types.SimpleNamespace(cuda=cuda, vendor=vendor, arrays=CudaNumpy(), kernel=Kernel(cuda, 4.0))


PROBLEM = Problem(16, 16, 16)


def test_hot_graph_is_one_set_and_time_is_per_call(rig):
    result = Timer(PROBLEM, GPU, rig.arrays, "graph-hot", seed=1).compare(rig.kernel, "ktlib_own")
    assert result.measurement.latency_us == pytest.approx(4.0, rel=0.03)
    assert result.baseline.latency_us == pytest.approx(8.0, rel=0.03)
    assert result.measurement.protocol == result.baseline.protocol == "graph-hot"
    assert len(set(rig.kernel.operands)) == 1
    assert rig.kernel.operands[0][0] == rig.vendor.operands[0][0]  # the same A,
    assert rig.kernel.operands[0][1] != rig.vendor.operands[0][1]  # but an output of its own
    assert 90 <= max(rig.cuda.captured) <= 110  # 400 us of 4 us calls
    assert rig.arrays.flushes == 0


def test_cold_graph_has_a_set_for_each_call_and_flushes_before_each_replay(rig):
    stopwatch = Timer(PROBLEM, GPU, rig.arrays, "graph-cold", seed=1)
    result = stopwatch.compare(rig.kernel, "ktlib_own")
    sets = len(stopwatch.sets.own)
    assert sets >= max(rig.cuda.captured)  # so no two calls of a sample share one
    assert len(set(rig.kernel.operands)) == sets  # and every output is written, for the check after timing
    assert rig.arrays.flushes == len(result.measurement.samples_us) + len(result.baseline.samples_us)


def test_cold_sets_of_a_large_problem_exceed_l2_three_times(rig):
    problem = Problem(512, 512, 512)
    stopwatch = Timer(problem, GPU, rig.arrays, "graph-cold", seed=1)
    assert len(stopwatch.sets.own) * problem.bytes_moved >= 3 * GPU.l2_bytes


def test_baseline_graph_is_captured_once_for_all_candidates(rig):
    stopwatch = Timer(PROBLEM, GPU, rig.arrays, "graph-hot", seed=1)
    stopwatch.compare(rig.kernel, "ktlib_own")
    before = len(rig.vendor.operands)
    stopwatch.compare(Kernel(rig.cuda, 2.0), "ktlib_own")
    assert len(rig.vendor.operands) == before


def test_stream_protocol_captures_nothing(rig):
    result = Timer(PROBLEM, GPU, rig.arrays, "stream", seed=1).compare(rig.kernel, "ktlib_own")
    assert rig.cuda.captured == []
    assert rig.cuda.replays == 0
    assert result.measurement.protocol == "stream"


def test_faster_of_two_baselines_is_kept(rig, monkeypatch):
    faster = Kernel(rig.cuda, 6.0)
    faster.method = "cublaslt_heuristic"
    monkeypatch.setattr(timer, "baselines", lambda problem, kind: (rig.vendor, faster))
    result = Timer(PROBLEM, GPU, rig.arrays, "graph-hot", seed=1).compare(rig.kernel, "ktlib_own")
    assert result.baseline.method == "cublaslt_heuristic"
    assert result.baseline.latency_us == pytest.approx(6.0, rel=0.03)


def test_every_method_is_timed_with_the_same_number_of_calls(rig):
    """A graph's own microseconds must weigh alike on a fast candidate and a slow vendor."""
    source = Timer(PROBLEM, GPU, rig.arrays, "graph-hot", seed=1)._source
    source.sampler(rig.kernel, True)
    source.sampler(Kernel(rig.cuda, 40.0), False)
    probe, *samples = rig.cuda.captured
    assert probe == cuda_timer.PROBE_CALLS
    assert len(samples) == 2
    assert samples[0] == samples[1]
    assert 90 <= samples[0] <= 110  # 400 us of 4 us calls
