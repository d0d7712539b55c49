"""A process that kills registered process groups when its parent dies, however it dies.

Started by build/process.py with the parent's pipe as standard input: `+PID` registers a group, `-PID`
forgets it, end of file means the parent is gone. Must not import anything of the project.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Read registrations until the parent is gone, then kill what is left."""
    alive: set[int] = set()
    for line in sys.stdin.buffer:
        pid = int(line[1:])
        (alive.add if line[:1] == b"+" else alive.discard)(pid)
    for pid in alive:
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


if __name__ == "__main__":
    main()
