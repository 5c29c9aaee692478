"""Event queue of a request's dispatch with its timers: deadline, missing progress, late first token."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import Enum
from math import inf
from typing import Generic, TypeVar

T = TypeVar("T")

SHARE = 0.5
"""Part of the remaining time an attempt may pass without a new token before the next one is tried."""
LEAST_STALL_S = 0.25
"""But not less: no attempt would get anywhere."""


class EventQueue(Generic[T]):
    """Event queue with one reader; it is false while it is empty.

    An asyncio.Queue costs four times as much, and every token passes here."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def awaited(self) -> bool:
        """Return whether its reader has all that was told and waits for more."""
        return self._waiter is not None and not self._waiter.done()

    def post(self, item: T) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> T:
        """The oldest, once there is one."""
        while not self._items:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()


class Timer(Enum):
    """Timers of a dispatch: its deadline, missing progress, late first token."""

    DEADLINE, STALL, LATE = range(3)


class Timers:
    """Timers of one dispatch, from its creation to `stop`.

    `ring` is called with DEADLINE once and then no more; with STALL when a SHARE of the time that was left has passed
    without progress; with LATE when an attempt has made none since it was launched: `late` holds until it does.
    Progress costs no timer. deadline: of the loop's clock."""

    def __init__(self, deadline: float, ring: Callable[[Timer], None]) -> None:
        self.deadline = deadline
        self._loop, self._ring = asyncio.get_running_loop(), ring
        self._progress, self._late_at, self.late = self._loop.time(), inf, False
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def launched(self, late_s: float) -> None:
        """An attempt begins, whose first token should be there by then."""
        self._progress = self._loop.time()
        self._late_at, self.late = self._progress + late_s, False
        self._look()

    def progressed(self) -> None:
        self._progress, self._late_at, self.late = self._loop.time(), inf, False

    def stop(self) -> None:
        if self._timer:
            self._timer.cancel()

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - self._loop.time())

    def _look(self) -> None:
        self.stop()
        now = self._loop.time()
        if now >= self.deadline:
            self._ring(Timer.DEADLINE)
            return
        if now >= self._late_at:
            self._late_at, self.late = inf, True
            self._ring(Timer.LATE)
        if now >= self._stalled_at:
            self._progress = now
            self._ring(Timer.STALL)
        self._timer = self._loop.call_at(min(self._late_at, self._stalled_at, self.deadline), self._look)

    @property
    def _stalled_at(self) -> float:
        return self._progress + max(LEAST_STALL_S, SHARE * (self.deadline - self._progress))


class Backoff:
    """Waiting time of a request while nothing can take it.

    It is at most `most_s`, and at most half of the time that was left when it began to wait. `waiting`: whether it
    does."""

    PAUSE_S = (0.05, 0.25)
    """Shortest and longest pause between two looks for a node."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._until: float | None = None
        self._pause_s = self.PAUSE_S[0]

    @property
    def waiting(self) -> bool:
        return self._until is not None

    def over(self, left_s: float) -> bool:
        """Return whether it has waited long enough; begins to wait. `left_s`: until the request's deadline."""
        now = asyncio.get_running_loop().time()
        if self._until is None:
            self._until = now + min(self._most_s, SHARE * left_s)
        return now >= self._until

    def pause_s(self) -> float:
        """Until the next look."""
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, self.PAUSE_S[1])
        return pause_s

    def rest(self) -> None:
        """Something took it, and it got on."""
        self._until, self._pause_s = None, self.PAUSE_S[0]
