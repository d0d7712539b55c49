"""Samples on CUDA: graphs of n calls, and n calls from the host. Imported only where torch sees a GPU.

Must not know rounds or baselines; timer.py interleaves.
"""

from __future__ import annotations

import time
from typing import Any

from ktlib.problem import Problem
from ktlib_generator.families.base import Device
from ktlib_generator.measure.arrays import Arrays, torch_module
from ktlib_generator.measure.candidate import Candidate
from ktlib_generator.measure.timer import (
    COLD_L2_MULTIPLE,
    MAX_CALLS,
    OperandSets,
    Sampler,
    calls_for,
)

# Work queued ahead of the first event, so that events and graph are all enqueued before the clock starts
# (25 us at 2 GHz; a graph launch takes the host about 10).
HEAD_START_CYCLES = 50_000
# Calls of the small graph that finds out how many a sample needs: eager calls may be bound by the host.
PROBE_CALLS = 8


class CudaSource:
    """Takes samples on one stream of its own."""

    def __init__(self, problem: Problem, device: Device, arrays: Arrays, protocol: str, seed: int) -> None:
        self._torch = torch_module()
        self._stream = self._torch.cuda.Stream()
        self._protocol = protocol
        cold_bytes = COLD_L2_MULTIPLE * max(device.l2_bytes, 2**20)
        # Either the sets exceed L2 three times, or there is one for each call of a replay; with L2
        # overwritten in between, no call finds what an earlier one left.
        cold_sets = min(MAX_CALLS["cuda"], -(-cold_bytes // max(1, problem.bytes_moved)))
        cold = protocol == "graph-cold"
        self.sets = OperandSets(problem, arrays, cold_sets if cold else 1, seed)
        self._flush = arrays.buffer(cold_bytes) if cold else None
        self._sample_calls = 0  # set by the first method, the same for all
        arrays.synchronize()

    def sampler(self, method: Candidate, own_outputs: bool) -> Sampler:
        """Warm up on the timing stream, estimate, and capture or bind the calls of one sample."""
        sets = self.sets.own if own_outputs else self.sets.vendor
        torch = self._torch
        with torch.cuda.stream(self._stream):
            # Every set: a sample may hold fewer calls than there are sets, and each output is checked later.
            self._calls(method, sets, max(2, len(sets)))
            calls = self._calls_in_a_sample(method, sets)
            if self._protocol == "stream":
                return lambda: self._host_us(method, sets, calls)
            graph = self._capture(method, sets, calls)
            graph.replay()  # uploads the graph
            self._stream.synchronize()
        return lambda: self._replay_us(graph, calls)

    def _calls_in_a_sample(self, method: Candidate, sets: list[Any]) -> int:
        """How many calls a sample holds, for all methods alike.

        A graph costs something of its own: with fewer calls for one method it would weigh more on it (H200:
        0.2 to 0.6 us a call more for a method whose count came from slow eager calls).
        """
        if not self._sample_calls:
            if self._protocol == "stream":
                call_us = self._host_us(method, sets, PROBE_CALLS)
            else:
                probe = self._capture(method, sets, PROBE_CALLS)
                probe.replay()
                call_us = self._events_us(probe.replay) / PROBE_CALLS
            self._sample_calls = calls_for(call_us, "cuda")
        return self._sample_calls

    def _calls(self, method: Candidate, sets: list[Any], calls: int) -> None:
        """Enqueue calls over rotating sets."""
        run, stream, count = method.run, int(self._stream.cuda_stream), len(sets)
        for i in range(calls):
            a, b, c = sets[i % count]
            run(a, b, c, stream)

    def _capture(self, method: Candidate, sets: list[Any], calls: int) -> Any:
        """Capture the calls as a graph. Done by hand: `torch.cuda.graph` collects garbage first."""
        graph = self._torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            self._calls(method, sets, calls)
        finally:
            graph.capture_end()
        return graph

    def _replay_us(self, graph: Any, calls: int) -> float:
        with self._torch.cuda.stream(self._stream):
            if self._flush is not None:
                self._flush.zero_()
            return self._events_us(graph.replay) / calls

    def _events_us(self, work: Any) -> float:
        """Device time between two events around `work`, on the current (timing) stream."""
        cuda = self._torch.cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda._sleep(HEAD_START_CYCLES)
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000.0

    def _host_us(self, method: Candidate, sets: list[Any], calls: int) -> float:
        """Wall clock of calls from Python and one synchronise. The stream is idle at the start."""
        with self._torch.cuda.stream(self._stream):
            self._stream.synchronize()
            start = time.perf_counter_ns()
            self._calls(method, sets, calls)
            self._stream.synchronize()
            return (time.perf_counter_ns() - start) / 1000.0 / calls
