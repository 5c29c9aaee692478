"""Clock: virtual clock and event queue of a simulation, which jumps from one event to the next."""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable

Action = Callable[[], Awaitable[None] | None]
"""Event: a call, whose result is awaited if it returns an awaitable."""


class Clock:
    """Virtual clock: it runs planned events in order of time and jumps from one to the next.

    now: seconds since the simulation began. Events of the same time run in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._planned = 0

    def time(self) -> float:
        """Return the current time in seconds."""
        return self.now

    def at(self, when: float, action: Action) -> None:
        """Plan an event at a time; a past time means now."""
        self._planned += 1
        heapq.heappush(self._queue, (max(when, self.now), self._planned, action))

    def soon(self, delay_s: float, action: Action) -> None:
        """Plan an event in `delay_s` seconds."""
        self.at(self.now + delay_s, action)

    async def run(self, done: Callable[[], bool]) -> None:
        """Run events until `done` returns true or no event is left."""
        while self._queue and not done():
            self.now, _, action = heapq.heappop(self._queue)
            if (more := action()) is not None:
                await more
