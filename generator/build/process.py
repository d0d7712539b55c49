"""Runs compilers: each in a process group of its own, killed whole on timeout, on Ctrl-C and with its parent.

Must not know any compiler; the command and its limit come in as arguments.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_REAPER = Path(__file__).with_name("reaper.py")
# Starts the compiler once a line arrives, and never if this process dies first: no compiler may run before
# the reaper knows of it.
_GATE = ("/bin/sh", "-c", 'read -r go || exit 125; exec "$@" </dev/null', "sh")
_LOG_LIMIT_BYTES = 256 * 1024


@dataclass(frozen=True)
class CompilerRun:
    """How one compiler ended. `returncode` is negative for a signal; `timed_out` says whose it was."""

    returncode: int
    log: str
    timed_out: bool
    wall_s: float

    @property
    def ok(self) -> bool:
        """Whether the compiler ended by itself and reported success."""
        return self.returncode == 0 and not self.timed_out

    def reason(self, timeout_s: float) -> str:
        """Say in a line how a run that is not ok ended."""
        if self.timed_out:
            return f"compiler still running after {timeout_s:g} s, its process group was killed"
        if self.returncode < 0:
            name = _signal_name(-self.returncode)
            hint = " (out of memory? try fewer --jobs)" if self.returncode == -signal.SIGKILL else ""
            return f"compiler was killed by {name}{hint}"
        return f"compiler ended with exit code {self.returncode}"


class BuildsStopped(Exception):
    """Raised in build threads after `stop_all`: the run is ending and nothing may be started."""


class _Groups:
    """Process groups alive now, mirrored to a reaper that kills them if this process dies first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: set[int] = set()
        self._stopped = False
        self._reaper: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def start(
        self, command: Sequence[str], log: IO[bytes], cwd: Path | None, env: Mapping[str, str] | None
    ) -> Iterator[subprocess.Popen[bytes]]:
        # The lock spans start and registration, so stop() can never miss a compiler that is just starting.
        with self._lock:
            if self._stopped:
                raise BuildsStopped("builds were stopped")
            child = subprocess.Popen(
                [*_GATE, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=None if env is None else dict(env),
                start_new_session=True,
            )
            self._alive.add(child.pid)
            self._tell_reaper(f"+{child.pid}\n")
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError), child.stdin:
                child.stdin.write(b"\n")
        try:
            yield child
        finally:
            kill_group(child.pid)
            with self._lock:
                self._alive.discard(child.pid)
                # Told before the child is reaped: until then its number cannot belong to anyone else.
                self._tell_reaper(f"-{child.pid}\n")
            child.wait()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for pid in self._alive:
                kill_group(pid)

    def allow(self) -> None:
        with self._lock:
            self._stopped = False

    @property
    def stopped(self) -> bool:
        return self._stopped

    def _tell_reaper(self, line: str) -> None:
        if self._reaper is None or self._reaper.poll() is not None:
            self._reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_REAPER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            atexit.register(self._release_reaper)
            line = "".join(f"+{pid}\n" for pid in self._alive) if line.startswith("+") else line
        assert self._reaper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._reaper.stdin.write(line.encode("ascii"))
            self._reaper.stdin.flush()

    def _release_reaper(self) -> None:
        if self._reaper is not None and self._reaper.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._reaper.stdin.close()
            self._reaper.wait()


_groups = _Groups()


def run_compiler(
    command: Sequence[str],
    *,
    timeout_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> CompilerRun:
    """Run one compiler to its end or its limit; nothing it started outlives the call.

    Raises:
        BuildsStopped: `stop_all` was called; the compiler is gone and its outcome means nothing.
        OSError: no process can be started.
    """
    import tempfile

    begin = time.monotonic()
    # A file, not a pipe: a grandchild that keeps a pipe open would block the reader past the limit.
    with tempfile.TemporaryFile() as log:
        with _groups.start(command, log, cwd, env) as child:
            timed_out = not _ended_within(child.pid, timeout_s)
        if _groups.stopped:
            raise BuildsStopped("builds were stopped")
        log.seek(0)
        text = log.read(_LOG_LIMIT_BYTES).decode("utf-8", errors="replace")
    return CompilerRun(child.returncode, text, timed_out, time.monotonic() - begin)


def stop_all() -> None:
    """Kill every compiler now and refuse new ones, until `allow`; safe to call from any thread."""
    _groups.stop()


def allow() -> None:
    """Let compilers be started again after `stop_all`."""
    _groups.allow()


def _ended_within(pid: int, timeout_s: float) -> bool:
    # Waits without reaping: until the caller reaps, neither the process nor the group number is reused,
    # so killing the group afterwards cannot hit a stranger.
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(descriptor)


def kill_group(pid: int) -> None:
    """Kill a whole process group; one that is already gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
