"""Monotonic clock that excludes time in which this process was suspended, and the time threads waited for a core.

A process that was frozen must not declare its peers dead."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TICK_S = 0.25
"""Interval of a clock's ticks, in seconds."""


def core_wait_s(native_id: int | None) -> float:
    """Return how many seconds a thread of this process was runnable but waited for a core, in total.

    The value is as of the thread's last time slice; 0 if the system does not report it."""
    try:
        with open(_schedstat(native_id), "rb", buffering=0) as file:
            return _waited_s(file.fileno())
    except OSError:
        return 0.0


@contextmanager
def own_core_wait_s() -> Iterator[Callable[[], float]]:
    """Yield a function that returns `core_wait_s` of the calling thread, for frequent calls.

    It keeps the file open: opening costs ten times as much as reading."""
    try:
        fd = os.open(_schedstat(threading.get_native_id()), os.O_RDONLY)
    except OSError:
        yield float
        return
    try:
        yield lambda: _waited_s(fd)
    finally:
        os.close(fd)


def _schedstat(native_id: int | None) -> str:
    return f"/proc/self/task/{native_id}/schedstat"


def _waited_s(fd: int) -> float:
    try:
        return int(os.pread(fd, 80, 0).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class SuspendAwareClock:
    """Clock of the seconds during which its owner ran.

    Ticks are due every `tick_s`; at most twice that counts between two ticks, since a stopped process or a blocked loop
    cannot receive signs of life of its peers."""

    def __init__(self, tick_s: float = TICK_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.tick_s = tick_s
        self._clock, self._ticked, self._at = clock, clock(), 0.0

    def tick(self) -> None:
        """Record that the owner runs; call it on the owner's thread."""
        self._at, self._ticked = self.now(), self._clock()

    def now(self) -> float:
        """Return the time during which the owner ran, in seconds."""
        return self._at + min(self._clock() - self._ticked, 2 * self.tick_s)


class LoopClock(SuspendAwareClock):
    """Clock that ticks on an asyncio loop between `start` and `stop`.

    `ticks` counts them: while it does not grow, the loop is blocked."""

    def __init__(self, tick_s: float = TICK_S) -> None:
        super().__init__(tick_s)
        self.ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Tick now and every `tick_s` after that; call it within the running loop."""
        self.tick()
        self.ticks += 1
        self._timer = asyncio.get_running_loop().call_later(self.tick_s, self.start)

    def stop(self) -> None:
        """Stop ticking."""
        if self._timer is not None:
            self._timer.cancel()
