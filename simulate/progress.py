"""SimulationProgress: prints how many requests of a running simulation have ended."""

from __future__ import annotations

import time
from collections.abc import Callable

LINE_S = 10.0
"""Minimum time between two lines, in seconds."""


class SimulationProgress:
    """Prints how many requests have ended, at most every LINE_S seconds.

    name: of the simulation."""

    def __init__(
        self, name: str, total: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._total, self._say, self._clock = name, total, say, clock
        self._printed_at = clock()

    def report(self, count: int) -> None:
        """Print a line if one is due; `count` requests have not ended yet."""
        if self._clock() - self._printed_at >= LINE_S:
            self._printed_at = self._clock()
            self._say(f"{self._name}: {self._total - count} of {self._total} requests")
