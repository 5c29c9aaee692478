"""Stop signal of a process: SIGTERM starts the drain, SIGINT or a second signal cuts it short."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable


class StopSignal:
    """Stop request of a process, for one asyncio loop.

    SIGTERM sets `requested`: running work may finish. SIGINT or a second signal also sets `forced`."""

    def __init__(self) -> None:
        self.requested, self.forced = asyncio.Event(), asyncio.Event()

    def listen(self) -> None:
        """Start handling SIGTERM and SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle, number)

    def drain_window(self, seconds: float) -> Callable[[], bool]:
        """Return a function that is true while running work may finish: for `seconds`, unless `forced` is set."""
        deadline = time.monotonic() + seconds
        return lambda: not self.forced.is_set() and time.monotonic() < deadline

    def handle(self, number: int) -> None:
        """Handle a signal."""
        if number == signal.SIGINT or self.requested.is_set():
            self.forced.set()
        self.requested.set()
