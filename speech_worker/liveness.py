"""SpeechLiveness: progress of a speech node's engine thread and asyncio loop, for the watchdog and heartbeats."""

from __future__ import annotations

from kvferry.engine.speech.loop import SpeechLoop
from kvferry.protocol.messages import Pulse
from kvferry.runtime.suspend_aware_clock import LoopClock, SuspendAwareClock, core_wait_s
from kvferry.worker.watchdog import LOOP_S, WatchedThread

ENGINE_S = 60.0
"""Seconds without progress after which the engine counts as hanging; an encoder layer takes seconds on a CPU."""


class SpeechLiveness:
    """Progress of the engine thread and the asyncio loop. Implements `worker.watchdog.Liveness`."""

    def __init__(self, engine: SpeechLoop, loop: LoopClock) -> None:
        self._engine, self._clock = engine, SuspendAwareClock()
        self._of_engine = WatchedThread(lambda: engine.mark, starved=lambda: core_wait_s(engine.native_id))
        self._of_loop = WatchedThread(lambda: loop.ticks)

    def check(self) -> None:
        """Check both threads once."""
        self._clock.tick()
        for each in (self._of_engine, self._of_loop):
            each.check(self._clock.now())

    @property
    def pulse(self) -> Pulse:
        """Return the last observation, without the engine's: no token stream waits for a long turn."""
        return Pulse(loop_s=round(self._of_loop.still_s, 2))

    @property
    def fault(self) -> str | None:
        """Return why the process must end; None: no fault."""
        if self._engine.fault:
            return self._engine.fault
        if self._of_engine.still_s - self._of_engine.starved_s > ENGINE_S:
            return f"a turn of the engine has taken {self._of_engine.still_s:.0f} s"
        if self._of_loop.still_s > LOOP_S:
            return f"the asyncio loop has made no progress for {self._of_loop.still_s:.0f} s"
        return None
