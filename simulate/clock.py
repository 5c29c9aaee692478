"""Virtual clock and event queue."""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable

Deed = Callable[[], Awaitable[None] | None]


class Clock:
    """`now`: seconds since the simulation began. Deeds of one moment happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._deeds: list[tuple[float, int, Deed]] = []
        self._planned = 0

    def time(self) -> float:
        return self.now

    def at(self, when: float, deed: Deed) -> None:
        """Plan a deed, not before now."""
        self._planned += 1
        heapq.heappush(self._deeds, (max(when, self.now), self._planned, deed))

    def soon(self, delay_s: float, deed: Deed) -> None:
        self.at(self.now + delay_s, deed)

    async def run(self, done: Callable[[], bool]) -> None:
        """Until `done`, or nothing is planned."""
        while self._deeds and not done():
            self.now, _, deed = heapq.heappop(self._deeds)
            if (more := deed()) is not None:
                await more
