"""StepStats: figures of each step (tokens by phase, preemptions, evictions, drafts, checkpoints) as a Stepped event."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.engine.cache_use import IdleStats
from kvferry.engine.events import Stepped
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.speculation import Speculation
from kvferry.engine.step_slices import Slice


class StepStats:
    """Statistics of one engine's steps."""

    def __init__(self, scheduler: Scheduler, speculation: Speculation) -> None:
        self._scheduler, self._speculation = scheduler, speculation
        self._preempted = self._evicted = 0
        self._checkpoints = 0, 0
        self._idle = IdleStats()

    def step(self, slices: Sequence[Slice], seconds: float) -> Stepped:
        """Record a step of these slices, with preemptions and evictions since the one before."""
        decodes = sum(s.streams for s in slices)
        preempted, evicted = self._scheduler.preempted_total, self._scheduler.pool.evicted_total
        drafted, accepted = self._speculation.take()
        states = self._scheduler.blocks.states
        checkpoints = (states.saved_total, states.loaded_total) if states is not None else (0, 0)
        event = Stepped(
            seconds,
            prefill_tokens=sum(s.count for s in slices) - decodes,
            decode_tokens=decodes + accepted,
            preempted=preempted - self._preempted,
            evicted=evicted - self._evicted,
            drafted=drafted,
            accepted=accepted,
            idle=self._scheduler.pool.idle.stats.since(self._idle),
            saved=checkpoints[0] - self._checkpoints[0],
            loaded=checkpoints[1] - self._checkpoints[1],
        )
        self._preempted, self._evicted, self._checkpoints = preempted, evicted, checkpoints
        self._idle = self._scheduler.pool.idle.stats.copy()
        return event
