"""SchedulerSlots: requests wait here for a slot, in fair order, until the model's nodes have capacity.

A window bounds the work on the nodes: as many sequences as decode nodes run, and as many prompt tokens as prefill nodes
compute in a moment. If the window has space and no request waits, a slot is granted at once without scheduling."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import NamedTuple

from kvferry.placement.capacity import Capacity
from kvferry.protocol.errors import Overloaded
from kvferry.protocol.fast_init import fast_init
from kvferry.protocol.metrics import RouterMetrics
from kvferry.router.request_context import RequestContext
from kvferry.router.tenants.arrival_rate import ArrivalRate
from kvferry.router.tenants.backlog import Waiting
from kvferry.router.tenants.fair_queue import FairQueue
from kvferry.router.tenants.tenant import Tenant
from kvferry.router.tenants.tenant_queue import OUTPUT_WEIGHT, Slot, Window

HORIZON_S = 0.1
"""With several tenants: prompts queued on the nodes ahead of the next arrival, in seconds of computation."""
AHEAD = 2
"""With one tenant: sequences in flight, as a multiple of running ones, so that no node idles."""
LOOK_S = 0.5
"""Interval at which the capacity is checked while requests wait, in seconds."""
LOOKED_AT = 32
"""Number of newest waiting slots checked at each interval for missed deadlines."""
MEMORY_S = 20.0
"""Time constant of the throughput estimate, in seconds."""
WORTH_S = 2.0
"""Observation time before the throughput estimate may reject requests, in seconds."""


@fast_init
@dataclass(frozen=True, slots=True)
class Size:
    """Size of one request: sequences, prompt tokens, and maximum output tokens per sequence."""

    sequences: int
    prompt: int
    most_output: int


class ThroughputEstimate:
    """Work done per second, in tokens, measured while requests wait, since only then are the nodes saturated."""

    def __init__(self) -> None:
        self._work = self._seconds = 0.0
        self._since: float | None = None

    def busy(self, now: float, waiting: bool) -> None:
        """Record whether requests wait from now on."""
        self._pass(now)
        self._since = now if waiting else None

    def done(self, work: float, now: float) -> None:
        """Count finished work."""
        if self._since is not None:
            self._pass(now)
            self._work += work

    @property
    def rate(self) -> float:
        """Return the work per second; 0 while unknown."""
        return self._work / self._seconds if self._seconds >= WORTH_S else 0.0

    def _pass(self, now: float) -> None:
        if self._since is not None:
            elapsed, self._since = now - self._since, now
            fade = max(0.0, 1 - elapsed / MEMORY_S)
            self._work, self._seconds = self._work * fade, self._seconds * fade + elapsed


class Waiter(NamedTuple):
    """Waiting request: a future that resolves when its slot begins or is too late, and the deadline."""

    coming: asyncio.Future[None]
    deadline: float


class SchedulerSlots:
    """Slot queue of one pool of nodes, bound to an asyncio loop.

    capacity     returns what the nodes can take; called for every slot. Without it no request waits
    shared       returns whether there are several tenants
    most_queued  maximum number of waiting requests of one tenant
    """

    def __init__(
        self,
        capacity: Callable[[], Capacity] = Capacity,
        metrics: RouterMetrics | None = None,
        *,
        shared: Callable[[], bool] = lambda: False,
        most_queued: int = 512,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity, self._shared, self._clock = capacity, shared, clock
        self._metrics = metrics or RouterMetrics()
        self._most_queued = most_queued
        self._queue = FairQueue()
        self._pace, self._flow = ThroughputEstimate(), ArrivalRate()
        self._waiters: dict[Slot, Waiter] = {}
        self._told = 0
        self._look: asyncio.TimerHandle | None = None

    async def take(self, tenant: Tenant, call: RequestContext, size: Size) -> Slot:
        """Wait for a slot and return it; the caller must call `end`, and may call `began` before.

        Raises Overloaded as soon as the slot cannot come before the call's deadline or its tenant's target, or if too
        many of the tenant's requests wait."""
        self._flow.came(size.sequences, self._clock())
        turn = self._queue.enter(
            tenant,
            size.sequences,
            size.prompt,
            size.most_output,
            call.priority,
            patient=call.is_patient,
            session=call.session,
        )
        self._deal()
        if not turn.begun:
            await self._wait(turn, call)
        return turn

    def began(self, turn: Slot, share: float) -> None:
        """Record the first token; `share` is the fraction of the prompt that was computed."""
        self._queue.compute(turn, share)
        if self._queue.queued:
            self._deal()

    def end(self, turn: Slot, computed: int, output: int) -> None:
        """End a slot, with the prompt tokens computed and the output tokens generated."""
        self._queue.leave(turn, computed, output)
        if self._queue.queued:
            self._pace.done(computed + OUTPUT_WEIGHT * output, self._clock())
            self._deal()

    @property
    def waiting(self) -> Waiting:
        """Return a summary of all waiting requests."""
        seconds = self._queue.work / self._pace.rate if self._pace.rate else inf
        sequences = sum(turn.sequences for turn in self._waiters)
        return Waiting(sequences, sum(turn.prompt for turn in self._waiters), seconds, self._flow.ratio)

    async def _wait(self, turn: Slot, call: RequestContext) -> None:
        now = self._clock()
        latest = min(call.deadline, call.first_by)
        try:
            self._check(turn, latest - now)
            coming = asyncio.get_running_loop().create_future()
            self._waiters[turn] = Waiter(coming, latest)
            self._note()
            try:
                async with asyncio.timeout(max(0.0, latest - now)):
                    await coming
            except TimeoutError:
                raise self._hopeless(self._ahead_s(turn)) from None
        except BaseException:
            self._waiters.pop(turn, None)
            self.end(turn, 0, 0)
            self._note()
            raise
        self._metrics.turn_wait.observe(self._clock() - now)

    def _check(self, turn: Slot, left_s: float) -> None:
        lane = turn.lane
        if lane.queued > self._most_queued:
            place_s = self._ahead_s(turn) / lane.queued
            raise Overloaded(f"{lane.queued - 1} requests are queued, the limit", retry_after=max(1.0, place_s))
        ahead_s = self._ahead_s(turn)
        if ahead_s > left_s:
            raise self._hopeless(ahead_s - left_s)

    def _ahead_s(self, turn: Slot) -> float:
        """Estimate the seconds until the slot begins; 0 while unknown."""
        return self._queue.ahead(turn) / self._pace.rate if self._pace.rate else 0.0

    def _hopeless(self, again_s: float) -> Overloaded:
        queued = len(self._waiters)
        return Overloaded(
            f"{queued} requests are queued; this one would not start before its deadline or its tenant's target",
            retry_after=max(1.0, again_s),
        )

    def _deal(self) -> None:
        """Begin all slots that fit into the window."""
        window, some_waited = self._window(), bool(self._waiters)
        while (turn := self._queue.next(window)) is not None:
            self._flow.began(turn.sequences, self._clock())
            waiter = self._waiters.pop(turn, None)
            if waiter is not None and not waiter.coming.done():
                waiter.coming.set_result(None)
        if some_waited:
            self._note()

    def _window(self) -> Window:
        capacity, shared = self._capacity(), self._shared()
        if not capacity.sequences:
            return Window()
        if not shared:
            return Window(AHEAD * capacity.sequences)
        return Window(capacity.sequences, HORIZON_S * capacity.prompt_per_s, True)

    def _note(self) -> None:
        """Update metrics and the timer after the set of waiting requests changed."""
        waiting = len(self._waiters)
        self._metrics.queued.inc(waiting - self._told)
        self._told = waiting
        self._pace.busy(self._clock(), waiting > 0)
        if self._look is not None and not waiting:
            self._look.cancel()
            self._look = None
        elif self._look is None and waiting:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._deal()
        self._send_away()
        self._note()

    def _send_away(self) -> None:
        """Reject a few waiting requests that will miss their deadline, as soon as that is known."""
        now, most_s = self._clock(), self._queue.work / self._pace.rate if self._pace.rate else 0.0
        doubtful = (pair for pair in reversed(self._waiters.items()) if now + most_s > pair[1].deadline)
        for turn, waiter in list(islice(doubtful, LOOKED_AT)):
            late_s = now + self._ahead_s(turn) - waiter.deadline
            if late_s > 0 and not waiter.coming.done():
                waiter.coming.set_exception(self._hopeless(late_s))
