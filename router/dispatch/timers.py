"""Event queue and timers of one dispatch (deadline, stall, late token), and pauses between repeated placements."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import Enum
from math import inf
from typing import Generic, TypeVar

T = TypeVar("T")

STALL_SHARE = 0.5
"""Fraction of the remaining time that may pass without a new token before the attempt is given up."""
LATE_REPEAT_S = 0.5
"""Pause before LATE is repeated for a request that waits for room on a crowded node, in seconds."""
MIN_STALL_S = 0.25
"""Shortest time without progress before a STALL, in seconds, so that each attempt can make progress."""


class EventQueue(Generic[T]):
    """Event queue with one reader; false while it is empty.

    An asyncio.Queue costs four times as much, and every token passes through here."""

    __slots__ = ("_items", "_loop", "_waiter")

    def __init__(self) -> None:
        self._items: deque[T] | None = None
        """None while it is empty: a deque takes 760 bytes, and every open stream has an empty queue."""
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items) if self._items is not None else 0

    @property
    def awaited(self) -> bool:
        """Return whether the reader has consumed all items and waits for the next one."""
        return self._waiter is not None and not self._waiter.done()

    def post(self, item: T) -> None:
        """Append an item and wake the reader."""
        if self._items is None:
            self._items = deque()
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> T:
        """Remove and return the oldest item; wait until there is one."""
        while self._items is None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._items.popleft()
        if not self._items:
            self._items = None
        return item


class Timer(Enum):
    """Timers of a dispatch: its deadline, missing progress, late first token."""

    DEADLINE, STALL, LATE = range(3)


class Timers:
    """Timers of one dispatch, from its creation to `stop`.

    `on_timer` is called with
    - DEADLINE once, and nothing after it,
    - STALL when STALL_SHARE of the remaining time has passed without progress,
    - LATE when no token came within the time for which `expect` was called, and LATE_REPEAT_S after `repeat_late`;
      `late` is true until a token comes.

    `deadline` is a time of the loop's clock. Recording progress re-arms no timer."""

    def __init__(self, deadline: float, on_timer: Callable[[Timer], None]) -> None:
        self.deadline = deadline
        self._loop, self._on_timer = asyncio.get_running_loop(), on_timer
        self._progress, self._late_at, self.late = self._loop.time(), inf, False
        self._timer: asyncio.TimerHandle | None = None
        self.stalled_s = 0.0
        """Seconds without progress at the last STALL."""

    def pause(self, seconds: float, post: Callable[[None], None]) -> None:
        """Call `post` after a pause in which no attempt runs; the deadline still applies during it."""
        if self._timer is None:
            self._check()
        self._loop.call_later(seconds, post, None)

    def expect(self, late_s: float) -> None:
        """Expect the next token within `late_s` seconds: an attempt starts, or its next phase."""
        now = self._progress = self._loop.time()
        self._late_at, self.late = now + late_s, False
        if now >= self.deadline:
            self._check()
            return
        self.stop()
        stalls_s = max(MIN_STALL_S, STALL_SHARE * (self.deadline - now))
        self._timer = self._loop.call_at(min(self._late_at, now + stalls_s, self.deadline), self._check)

    def repeat_late(self) -> None:
        """Ring LATE once more in a while, unless a token arrives."""
        if self.late and self._timer:
            self._late_at = self._loop.time() + LATE_REPEAT_S
            self.stop()
            self._timer = self._loop.call_at(min(self._late_at, self._stalled_at, self.deadline), self._check)

    def progressed(self) -> None:
        """Record that a token arrived."""
        self._progress, self._late_at, self.late = self._loop.time(), inf, False

    def stop(self) -> None:
        """Cancel the pending timer."""
        if self._timer:
            self._timer.cancel()

    @property
    def left_s(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - self._loop.time())

    def _check(self) -> None:
        self.stop()
        now = self._loop.time()
        if now >= self.deadline:
            self._on_timer(Timer.DEADLINE)
            return
        if now >= self._late_at:
            self._late_at, self.late = inf, True
            self._on_timer(Timer.LATE)
        if now >= self._stalled_at:
            self.stalled_s, self._progress = now - self._progress, now
            self._on_timer(Timer.STALL)
        self._timer = self._loop.call_at(min(self._late_at, self._stalled_at, self.deadline), self._check)

    @property
    def _stalled_at(self) -> float:
        return self._progress + max(MIN_STALL_S, STALL_SHARE * (self.deadline - self._progress))


class Spacing:
    """Times for work that many requests repeat: at least `gap_s` apart, however many there are."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s, self._last = gap_s, -inf

    def at(self, soonest: float) -> float:
        """Return the next free time from `soonest` on, and take it."""
        self._last = max(soonest, self._last + self._gap_s)
        return self._last


class Backoff:
    """Waiting time of a request that no node can take, with growing pauses between placements.

    The wait lasts at most `max_s` seconds, and at most STALL_SHARE of the time that was left when it began."""

    PAUSE_S = (0.05, 0.25)
    """Shortest and longest pause between two placements, in seconds."""

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._until: float | None = None
        self._pause_s = self.PAUSE_S[0]

    @property
    def waiting(self) -> bool:
        """Return whether the request waits for a node."""
        return self._until is not None

    def expired(self, left_s: float) -> bool:
        """Start waiting; return whether the wait has lasted long enough, given `left_s` seconds to the deadline."""
        now = asyncio.get_running_loop().time()
        if self._until is None:
            self._until = now + min(self._max_s, STALL_SHARE * left_s)
        return now >= self._until

    def pause_s(self) -> float:
        """Return the seconds until the next placement, and double the pause."""
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, self.PAUSE_S[1])
        return pause_s

    def reset(self) -> None:
        """Reset after the request made progress."""
        self._until, self._pause_s = None, self.PAUSE_S[0]
