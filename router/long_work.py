"""Paces work on long bodies and media: it runs on the event loop in slices, which take a quarter of a core together.

A slice is short, but at full speed the slices of a body of 16 MiB keep a core busy for a tenth of a second. A node's
step beside it takes twice as long then, if router and nodes share cores."""

from __future__ import annotations

import asyncio
import time

SHARE = 0.25
"""Share of a core that all slices of an event loop take together, so long as they follow one another."""
MIN_SLEEP_S = 0.002
"""Shortest wait between two slices, in seconds; shorter ones add up first, since timers count milliseconds."""


class _Pace:
    """Time from which the next slice may run, on the clock of `time.monotonic`. One for each process."""

    free_at = 0.0


class LongWork:
    """Work of one request, from its creation on in slices, each of which ends with `pause`.

    Between two calls the task must wait for nothing else, since the CPU time of the thread between them is counted."""

    __slots__ = ("_began",)

    def __init__(self) -> None:
        self._began = time.thread_time()

    async def pause(self) -> None:
        """End a slice; return when the next one may run, after other work of the event loop."""
        await paced(time.thread_time() - self._began)
        self._began = time.thread_time()


async def paced(cost_s: float) -> None:
    """Wait until the work before has had its time, and count work that takes `cost_s` seconds of CPU."""
    now = time.monotonic()
    begins = max(_Pace.free_at, now)
    _Pace.free_at = begins + cost_s / SHARE
    await asyncio.sleep(begins - now if begins - now >= MIN_SLEEP_S else 0)
