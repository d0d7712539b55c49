"""Ctrl-C and SIGTERM during a long run: stop at once, but never between the halves of a write.

Must not clean up anything itself; it raises KeyboardInterrupt and the owner of each resource lets go.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Turns the first signal into KeyboardInterrupt, held back while `shield` is open.

    Signals that follow are held back too until `rearm`, so that an impatient second Ctrl-C cannot cut the
    clean-up short. Outside the main thread it does nothing, since Python delivers signals only there.
    """

    def __init__(self) -> None:
        self._shielded = 0
        self._pending = False
        self._raised = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Hold a signal back until the block ends."""
        self._shielded += 1
        try:
            yield
        finally:
            self._shielded -= 1
            self._deliver()

    def rearm(self) -> None:
        """Let the next signal raise again."""
        self._raised = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._pending = True
        self._deliver()

    def _deliver(self) -> None:
        if self._pending and not self._shielded and not self._raised:
            self._pending = False
            self._raised = True
            raise KeyboardInterrupt
