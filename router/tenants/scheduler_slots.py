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
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.request_context import RequestContext
from kvferry.router.tenants.arrival_rate import ArrivalRate
from kvferry.router.tenants.backlog import Waiting
from kvferry.router.tenants.fair_queue import FairQueue
from kvferry.router.tenants.tenant import Tenant
from kvferry.router.tenants.tenant_queue import OUTPUT_WEIGHT, Slot, Window

HORIZON_S = 0.1
"""Prompts queued on the nodes ahead of the next arrival, with several tenants, in seconds of computation."""
RUN_AHEAD = 2
"""Multiple of the running sequences that may be in flight, with one tenant, so that no node idles."""
CHECK_S = 0.5
"""Interval at which the capacity is checked while requests wait, in seconds."""
CHECKED_SLOTS = 32
"""Number of newest waiting slots checked at each interval for missed deadlines."""
THROUGHPUT_DECAY_S = 20.0
"""Time constant of the throughput estimate, in seconds."""
MIN_OBSERVED_S = 2.0
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
        self._decay(now)
        self._since = now if waiting else None

    def done(self, work: float, now: float) -> None:
        """Count finished work."""
        if self._since is not None:
            self._decay(now)
            self._work += work

    @property
    def rate(self) -> float:
        """Return the work per second; 0 while unknown."""
        return self._work / self._seconds if self._seconds >= MIN_OBSERVED_S else 0.0

    def _decay(self, now: float) -> None:
        if self._since is not None:
            elapsed, self._since = now - self._since, now
            factor = max(0.0, 1 - elapsed / THROUGHPUT_DECAY_S)
            self._work, self._seconds = self._work * factor, self._seconds * factor + elapsed


class Waiter(NamedTuple):
    """Waiting request: a future that resolves when its slot begins or is too late, and the deadline."""

    started: asyncio.Future[None]
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
        self._throughput, self._arrivals = ThroughputEstimate(), ArrivalRate()
        self._waiters: dict[Slot, Waiter] = {}
        self._reported = 0
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, tenant: Tenant, call: RequestContext, size: Size) -> Slot:
        """Wait for a slot and return it; the caller must call `end`, and may call `began` before.

        Raises Overloaded as soon as the slot cannot come before the call's deadline or its tenant's target, or if too
        many of the tenant's requests wait."""
        self._arrivals.arrived(size.sequences, self._clock())
        slot = self._queue.add(
            tenant,
            size.sequences,
            size.prompt,
            size.most_output,
            call.priority,
            background=call.is_background,
            session=call.session,
        )
        self._start_slots()
        if not slot.begun:
            await self._wait(slot, call)
        return slot

    def began(self, slot: Slot, share: float) -> None:
        """Record the first token; `share` is the fraction of the prompt that was computed."""
        self._queue.record_first_token(slot, share)
        if self._queue.queued:
            self._start_slots()

    def end(self, slot: Slot, computed: int, output: int) -> None:
        """End a slot, with the prompt tokens computed and the output tokens generated."""
        self._queue.end(slot, computed, output)
        if self._queue.queued:
            self._throughput.done(computed + OUTPUT_WEIGHT * output, self._clock())
            self._start_slots()

    @property
    def waiting(self) -> Waiting:
        """Return a summary of all waiting requests."""
        seconds = self._queue.work / self._throughput.rate if self._throughput.rate else inf
        sequences = sum(slot.sequences for slot in self._waiters)
        return Waiting(sequences, sum(slot.prompt for slot in self._waiters), seconds, self._arrivals.ratio)

    async def _wait(self, slot: Slot, call: RequestContext) -> None:
        now = self._clock()
        latest = min(call.deadline, call.first_by)
        try:
            self._check(slot, latest - now)
            started = asyncio.get_running_loop().create_future()
            self._waiters[slot] = Waiter(started, latest)
            self._update()
            try:
                async with asyncio.timeout(max(0.0, latest - now)):
                    await started
            except TimeoutError:
                raise self._rejection(self._wait_s(slot)) from None
        except BaseException:
            self._waiters.pop(slot, None)
            self.end(slot, 0, 0)
            self._update()
            raise
        self._metrics.turn_wait.observe(self._clock() - now)

    def _check(self, slot: Slot, left_s: float) -> None:
        queued, wait_s = slot.queue.queued, self._wait_s(slot)
        if queued > self._most_queued:
            raise Overloaded(f"{queued - 1} requests are queued, the limit", retry_after=max(1.0, wait_s / queued))
        if wait_s > left_s:
            raise self._rejection(wait_s - left_s)

    def _wait_s(self, slot: Slot) -> float:
        """Estimate the seconds until the slot begins; 0 while unknown."""
        return self._queue.work_ahead(slot) / self._throughput.rate if self._throughput.rate else 0.0

    def _rejection(self, retry_s: float) -> Overloaded:
        queued = len(self._waiters)
        return Overloaded(
            f"{queued} requests are queued; this one would not start before its deadline or its tenant's target",
            retry_after=max(1.0, retry_s),
        )

    def _start_slots(self) -> None:
        """Begin all slots that fit into the window."""
        window, some_waited = self._window(), bool(self._waiters)
        while (slot := self._queue.next(window)) is not None:
            self._arrivals.started(slot.sequences, self._clock())
            waiter = self._waiters.pop(slot, None)
            if waiter is not None and not waiter.started.done():
                waiter.started.set_result(None)
        if some_waited:
            self._update()

    def _window(self) -> Window:
        capacity, shared = self._capacity(), self._shared()
        if not capacity.sequences:
            return Window()
        if not shared:
            return Window(RUN_AHEAD * capacity.sequences)
        return Window(capacity.sequences, HORIZON_S * capacity.prompt_per_s, True)

    def _update(self) -> None:
        """Update metrics and the timer after the set of waiting requests changed."""
        waiting = len(self._waiters)
        self._metrics.queued.inc(waiting - self._reported)
        self._reported = waiting
        self._throughput.busy(self._clock(), waiting > 0)
        if self._timer is not None and not waiting:
            self._timer.cancel()
            self._timer = None
        elif self._timer is None and waiting:
            self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._recheck)

    def _recheck(self) -> None:
        self._timer = None
        self._start_slots()
        self._reject_late()
        self._update()

    def _reject_late(self) -> None:
        """Reject a few waiting requests that will miss their deadline, as soon as that is known."""
        now, work_s = self._clock(), self._queue.work / self._throughput.rate if self._throughput.rate else 0.0
        candidates = (pair for pair in reversed(self._waiters.items()) if now + work_s > pair[1].deadline)
        for slot, waiter in list(islice(candidates, CHECKED_SLOTS)):
            late_s = now + self._wait_s(slot) - waiter.deadline
            if late_s > 0 and not waiter.started.done():
                waiter.started.set_exception(self._rejection(late_s))
