"""Continuous measurement of an asyncio loop's lag, as a metric."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvferry.protocol.loop_metrics import LoopMetrics
from kvferry.runtime.suspend_aware_clock import own_core_wait_s

PERIOD_S = 0.05
"""Sampling period in seconds. A callback that blocks the loop for longer gives one sample with the whole lag."""


class LoopLag:
    """Timer that is due every PERIOD_S and records its delay.

    Time that the thread waited for a core is recorded separately: the machine causes it, not code on the loop."""

    def __init__(
        self,
        metrics: LoopMetrics,
        core_wait_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics, self._clock, self._core_wait_s = metrics, clock, core_wait_s
        self._due = self._core_waited_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start measuring; call it within the running loop."""
        self._core_waited_s = self._core_wait_s()
        self._schedule()

    def stop(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()

    def sample(self) -> None:
        """Record the lag and the wait for a core since the last sample, in seconds, and restart the timer."""
        late_s, core_waited_s = self._clock() - self._due, self._core_wait_s()
        spent_s, self._core_waited_s = core_waited_s - self._core_waited_s, core_waited_s
        self._metrics.core_wait.inc(max(0.0, spent_s))
        self._metrics.lag.observe(max(0.0, late_s - spent_s))
        self._schedule()

    def _schedule(self) -> None:
        self._due = self._clock() + PERIOD_S
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self.sample)


@asynccontextmanager
async def watched(metrics: LoopMetrics) -> AsyncIterator[None]:
    """Measure the running loop's lag during the `with` block."""
    with own_core_wait_s() as core_wait_s:
        lag = LoopLag(metrics, core_wait_s)
        lag.start()
        try:
            yield
        finally:
            lag.stop()
