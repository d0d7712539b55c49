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
# Signals that cannot cut the end of a run short: one to stop it, and two from an impatient hand.
HELD_TO_THE_END = 3


class Interrupts:
    """Turns the first signal into KeyboardInterrupt, held back while `shield` is open.

    Signals that follow are dropped, so that an impatient second Ctrl-C cannot cut the clean-up short; once
    `finish` was called, those after the third raise again. Outside the main thread it does nothing, since
    Python delivers signals only there.
    """

    def __init__(self) -> None:
        self._shielded = 0
        self._pending = False
        self._raised = False
        self._finishing = False
        self._count = 0
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

    def finish(self) -> None:
        """Only what saves and reports is left: let no signal cut it short but those after the third."""
        self._finishing = True
        self._pending = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self._pending = True
        self._deliver()

    def _deliver(self) -> None:
        if not self._pending or self._shielded:
            return
        may_raise = self._count > HELD_TO_THE_END if self._finishing else not self._raised
        if may_raise:
            self._pending = False
            self._raised = True
            raise KeyboardInterrupt
