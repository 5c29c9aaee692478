"""Continuous measurement of an asyncio loop's lag, as a metric."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvferry.protocol.loop_metrics import LoopMetrics
from kvferry.runtime.suspend_aware_clock import own_held_up_s

PERIOD_S = 0.05
"""Sampling period in seconds. A callback that blocks the loop for longer gives one sample with the whole lag."""


class LoopLag:
    """Timer that is due every PERIOD_S and records its delay.

    Time that the thread waited for a core is recorded separately: the machine causes it, not code on the loop."""

    def __init__(
        self,
        metrics: LoopMetrics,
        held_up: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics, self._clock, self._held_up = metrics, clock, held_up
        self._due = self._without = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start measuring; call it within the running loop."""
        self._without = self._held_up()
        self._again()

    def stop(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
        """Record the lag and the wait for a core since the last sample, in seconds, and restart the timer."""
        late_s, without_s = self._clock() - self._due, self._held_up()
        spent_s, self._without = without_s - self._without, without_s
        self._metrics.held_up.inc(max(0.0, spent_s))
        self._metrics.lag.observe(max(0.0, late_s - spent_s))
        self._again()

    def _again(self) -> None:
        self._due = self._clock() + PERIOD_S
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self.look)


@asynccontextmanager
async def watched(metrics: LoopMetrics) -> AsyncIterator[None]:
    """Measure the running loop's lag during the `with` block."""
    with own_held_up_s() as held_up:
        lag = LoopLag(metrics, held_up)
        lag.start()
        try:
            yield
        finally:
            lag.stop()
