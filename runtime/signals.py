"""Stop signal of a process: SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable


class StopSignal:
    """SIGTERM lets what runs finish; SIGINT or a second signal hurries. Belongs to one asyncio loop."""

    def __init__(self) -> None:
        self.asked, self.hurry = asyncio.Event(), asyncio.Event()

    def listen(self) -> None:
        """Take SIGTERM and SIGINT over from now on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask, number)

    def patience(self, seconds: float) -> Callable[[], bool]:
        """Tells for so long, and until there is a hurry, that what runs may finish."""
        deadline = time.monotonic() + seconds
        return lambda: not self.hurry.is_set() and time.monotonic() < deadline

    def ask(self, number: int) -> None:
        """A signal arrived."""
        if number == signal.SIGINT or self.asked.is_set():
            self.hurry.set()
        self.asked.set()
