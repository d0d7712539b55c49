"""The parent's side of measuring: one child process, its limits, and its replacement when one breaks it.

Must not load a candidate or touch the device itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
import uuid
from types import TracebackType
from typing import Any

from ktlib_generator.families.base import Device
from ktlib_generator.measure import framing
from ktlib_generator.measure.jobs import Job, Limits, Outcome
from ktlib_generator.values import Status

__all__ = ["Job", "Limits", "Outcome", "Worker", "WorkerError"]

# How often memory is looked at; a candidate can outrun it, and is then stopped by its address-space limit.
WATCH_S = 0.05
# Of what a candidate printed, this much goes into the log.
LOG_BYTES = 4096
# An answer is small; a forged one must not fill this process's memory.
MAX_ANSWER_BYTES = 2**20
# Marks the child and everything it starts (an environment is inherited), for the sweep after the child.
MARK = "KTLIB_MEASURING"
MAX_SWEEPS = 20


class WorkerError(RuntimeError):
    """The child process cannot start at all: the device or the installation is at fault, not a candidate."""


class Worker:
    """Measures jobs one at a time in a child process; not for use from two threads at once.

    Whatever a candidate does costs one Outcome: a child that hangs, dies, prints without end, grows beyond
    its memory or has a sticky CUDA error is killed with its whole process group, and the next job gets a new
    one. So does the job after a shared object: its code may have left anything behind, and what it started
    is killed in whatever session it is.
    """

    def __init__(self, device: Device, limits: Limits | None = None) -> None:
        self._device = device
        self._limits = limits or Limits()
        self._child: _Child | None = None
        self._jobs = 0
        self.starts = 0

    def run(self, job: Job) -> Outcome:
        """Measure one job. Ctrl-C ends the child before it is raised.

        Raises:
            WorkerError: a child process does not start.
        """
        try:
            if self._child is None:
                self._child = _Child(self._device, self._limits)
                self.starts += 1
            self._jobs += 1
            outcome, alive = self._child.run(job, self._jobs)
        except BaseException:
            self.close()
            raise
        if not alive:
            self.close()
        return outcome

    def close(self) -> None:
        """End the child process and everything it started."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class _Ended:
    """Why waiting for an answer ended without one."""

    status: Status
    reason: str


class _Child:
    """One child process with its three pipes: jobs, answers (and lifeline), and what is printed."""

    def __init__(self, device: Device, limits: Limits) -> None:
        self._limits, self._device = limits, device
        self._unpacker = framing.Unpacker(MAX_ANSWER_BYTES, 0)
        self._mark = uuid.uuid4().hex
        self._ran_foreign_code = False
        self._printed = bytearray()
        self._printed_bytes = 0
        job_read, self._job_write = os.pipe()
        self._answer_read, answer_write = os.pipe()
        lifeline_read, self._lifeline = os.pipe()
        theirs = (job_read, answer_write, lifeline_read)
        command = [sys.executable, "-m", "ktlib_generator.measure.child", *map(str, theirs)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=theirs,
            env={**os.environ, MARK: self._mark},
            start_new_session=True,  # Ctrl-C in the terminal reaches only the parent, which ends the child
        )
        for descriptor in theirs:
            os.close(descriptor)
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        for descriptor in (self._output, self._answer_read):
            os.set_blocking(descriptor, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._answer_read, selectors.EVENT_READ)
        self._selector.register(self._output, selectors.EVENT_READ)
        try:
            self._start()
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        device = self._device
        setup = {"device": dataclasses.asdict(device), "memory_bytes": self._limits.memory_bytes}
        with contextlib.suppress(framing.ClosedPipe):
            framing.send(self._job_write, setup)
        answer = self._wait(self._limits.start_s)
        if isinstance(answer, _Ended):
            raise WorkerError(
                f"measuring process for {device.name} did not start: {answer.reason}{self._tail()}"
            )

    def run(self, job: Job, number: int) -> tuple[Outcome, bool]:
        """Send a job and wait; return its outcome and whether this process may serve another."""
        self._printed_bytes, self._printed = 0, bytearray()
        foreign = job.binary is not None and job.binary.format == "shared_object"
        self._ran_foreign_code |= foreign
        message, blob = job.to_message()
        answer: dict[str, Any] | _Ended
        try:
            framing.send(self._job_write, {**message, "job": number}, blob)
            answer = self._wait(self._limits.wall_s)
        except framing.ClosedPipe:
            answer = _Ended(Status.LAUNCH_ERROR, self._death())
        if isinstance(answer, _Ended):
            return Outcome(answer.status, log=answer.reason + self._tail()), False
        spoilt = answer.pop("spoilt", True)
        try:
            if answer.pop("job", None) != number:
                raise ValueError("the answer is for another job")
            outcome = Outcome.from_message(answer)
            outcome.require_answer_to(job, self._device)
        except Exception as error:  # candidates can forge answers; no forgery may end the run
            reason = f"the measuring process gave a false answer: {type(error).__name__}: {error}"
            return Outcome(Status.REFUSED, log=reason[:LOG_BYTES]), False
        if outcome.status is not Status.OK:
            outcome = dataclasses.replace(outcome, log=outcome.log + self._tail())
        return outcome, not spoilt and not foreign

    def _wait(self, wall_s: float) -> dict[str, Any] | _Ended:
        """Read the pipes until a whole answer is there or a limit is reached."""
        limits = self._limits
        deadline = time.monotonic() + wall_s
        while True:
            try:
                message = self._unpacker.next()
            except ValueError as error:
                return _Ended(Status.REFUSED, f"the measuring process gave a false answer: {error}")
            if message is not None:
                return message[0]
            left = deadline - time.monotonic()
            if left <= 0:
                return _Ended(Status.TIMEOUT, f"no answer after {wall_s:g} s; the process was killed")
            closed = self._read(min(left, WATCH_S))
            if self._printed_bytes > limits.output_bytes:
                return _Ended(
                    Status.REFUSED, f"printed more than {limits.output_bytes} bytes; the process was killed"
                )
            resident = resident_bytes(self._process.pid)
            if resident > limits.memory_bytes:
                return _Ended(
                    Status.LAUNCH_ERROR,
                    f"used {resident} bytes of memory (allowed: {limits.memory_bytes}); it was killed",
                )
            if closed:
                return _Ended(Status.LAUNCH_ERROR, self._death())

    def _read(self, wait_s: float) -> bool:
        """Take what the pipes hold; return whether the answer pipe is closed."""
        closed = False
        for key, _ in self._selector.select(wait_s):
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if key.fd == self._answer_read:
                closed = not data
                self._unpacker.feed(data)
            elif data:
                self._printed_bytes += len(data)
                self._printed = (self._printed + data)[-LOG_BYTES:]
            else:
                self._selector.unregister(self._output)
        return closed

    def _death(self) -> str:
        """Say how the process ended, after reading what it still printed."""
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "the measuring process closed its pipes"
        while self._read(0.0) is False and self._selector.select(0.0):
            pass
        if code >= 0:
            return f"the measuring process ended with exit code {code}"
        return f"the measuring process was ended by {signal.Signals(-code).name}"

    def _tail(self) -> str:
        """What was printed last, for the log."""
        text = self._printed.decode("utf-8", "replace").strip()
        return f"\nprinted: {text}" if text else ""

    def kill(self) -> None:
        """Kill the process group and wait for the process; pipes are closed."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._ran_foreign_code:
            kill_marked(f"{MARK}={self._mark}")
        self._selector.close()
        for descriptor in (self._job_write, self._answer_read, self._lifeline):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        if self._process.stdout is not None:
            self._process.stdout.close()


def kill_marked(mark: str) -> None:
    """Kill every process whose environment holds `mark`, until none is left: what forks may fork again."""
    for _ in range(MAX_SWEEPS):
        found = False
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # gone, or another user's
                process = os.pidfd_open(int(name))  # holds on to it, should the number be used again
                try:
                    with open(f"/proc/{name}/environ", "rb") as file:
                        if mark.encode() in file.read().split(b"\0"):
                            signal.pidfd_send_signal(process, signal.SIGKILL)
                            found = True
                finally:
                    os.close(process)
        if not found:
            return
        time.sleep(0.01)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 once it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0
