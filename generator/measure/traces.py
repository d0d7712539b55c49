"""What host code may leave behind in its process: threads, signal handlers, timers, a floating-point mode.

Must not run a candidate; two looks are compared, one before it and one after.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from dataclasses import dataclass

# Byte of MXCSR in glibc's fenv_t on x86-64, and its exception flags, which every operation may raise.
_MXCSR_AT, _FENV_BYTES, _MXCSR_FLAGS = 28, 64, 0x3F
_TIMERS = {"ITIMER_REAL": "SIGALRM", "ITIMER_VIRTUAL": "SIGVTALRM", "ITIMER_PROF": "SIGPROF"}


@dataclass(frozen=True)
class Traces:
    """The process at one moment, as far as work can be put off through it or later results changed."""

    threads: int
    handlers: int
    timers: tuple[str, ...]
    floating_point: int

    @classmethod
    def now(cls) -> Traces:
        """Look at this process; takes about a tenth of a millisecond."""
        return cls(thread_count(), _caught_signals(), _running_timers(), _floating_point())

    def left_since(self) -> str | None:
        """Say what is there now that was not, or None."""
        after = Traces.now()
        if after.threads > self.threads:
            return f"threads: {after.threads - self.threads} threads were left running after the call"
        if set(after.timers) - set(self.timers):
            return f"timers: {', '.join(after.timers)} left pending after the call"
        new = after.handlers & ~self.handlers
        if new:
            names = ", ".join(_signal_name(i + 1) for i in range(64) if new >> i & 1)
            return f"signals: a handler for {names} was left installed after the call"
        if after.floating_point != self.floating_point:
            return (
                f"floating point: rounding or denormal mode changed from {self.floating_point:#x} to "
                f"{after.floating_point:#x}; a kernel must leave its caller's mode as it was"
            )
        return None


def thread_count() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def _caught_signals() -> int:
    """Mask of signals with a handler of any language, bit 0 for signal 1."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return int(line.split()[1], 16)
    return 0


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _running_timers() -> tuple[str, ...]:
    """Name the timers that will fire; POSIX timers only where the kernel lists them."""
    found = [sent for name, sent in _TIMERS.items() if any(signal.getitimer(getattr(signal, name)))]
    try:
        with open("/proc/self/timers") as file:
            found += [f"POSIX timer {line.split()[1]}" for line in file if line.startswith("ID:")]
    except OSError:
        pass
    return tuple(found)


def _floating_point() -> int:
    """Control bits of the floating-point unit: rounding, denormals, unmasked exceptions."""
    libm = ctypes.CDLL("libm.so.6")
    mode = int(libm.fegetround())
    if platform.machine() == "x86_64":
        environment = ctypes.create_string_buffer(_FENV_BYTES)
        libm.fegetenv(environment)
        mxcsr = int.from_bytes(environment.raw[_MXCSR_AT : _MXCSR_AT + 4], "little")
        mode |= (mxcsr & ~_MXCSR_FLAGS) << 16
    return mode
