"""What a call left behind in its process is seen: threads, timers, handlers, floating-point mode."""

from __future__ import annotations

import ctypes
import platform
import signal
import threading

import numpy as np
import pytest

from ktlib.problem import Problem
from ktlib_generator.measure.arrays import NumpyArrays
from ktlib_generator.measure.traces import Traces
from ktlib_generator.measure.verify import Verifier
from ktlib_generator.values import Status, Verification

LIBM = ctypes.CDLL("libm.so.6")
FE_TOWARDZERO = {"x86_64": 0xC00, "aarch64": 0xC00000}


@pytest.fixture
def before():
    return Traces.now()


def test_call_that_leaves_nothing_is_not_accused(before):
    signal.getitimer(signal.ITIMER_REAL)
    assert before.left_since() is None


def test_thread_left_running_is_seen(before):
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert "1 threads" in before.left_since()
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("name", ["ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF"])
def test_pending_timer_is_seen(before, name):
    signal.setitimer(getattr(signal, name), 1000.0)
    try:
        assert "timers" in before.left_since()
    finally:
        signal.setitimer(getattr(signal, name), 0.0)


def test_handler_that_python_does_not_know_is_seen(before):
    libc = ctypes.CDLL("libc.so.6")
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: None)
    old = libc.signal(signal.SIGALRM, ctypes.cast(handler, ctypes.c_void_p))
    try:
        assert "SIGALRM" in before.left_since()
    finally:
        libc.signal(signal.SIGALRM, old)


@pytest.mark.skipif(
    platform.machine() not in FE_TOWARDZERO, reason="the number of the mode is not known here"
)
def test_changed_rounding_is_seen(before):
    LIBM.fesetround(FE_TOWARDZERO[platform.machine()])
    try:
        found = before.left_since()
    finally:
        LIBM.fesetround(0)
    assert "floating point" in found


@pytest.mark.parametrize("foreign", [True, False])
def test_left_over_thread_is_refused_but_a_library_may_keep_its_own(foreign):
    stop = threading.Event()
    threads = []

    def run(a, b, c, stream):
        with np.errstate(all="ignore"):
            np.matmul(a.logical, b.logical, out=c.logical)
        if not threads:
            threads.append(threading.Thread(target=stop.wait))
            threads[0].start()

    try:
        found = Verifier(Problem(9, 8, 7, dtype="fp32"), NumpyArrays(), 1).verify(run, foreign=foreign)
    finally:
        stop.set()
        threads[0].join()
    if foreign:
        assert found.status is Status.REFUSED
        assert "threads" in found.reason
    else:
        assert isinstance(found, Verification)
