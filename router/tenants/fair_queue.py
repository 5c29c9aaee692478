"""FairQueue: start-time fair queue of requests over tenants, weighted by tokens of work.

Every request has a start tag: its tenant's previous finish tag, or the current virtual time if that is later, so that
idle tenants gain neither credit nor debt. The lowest tag goes first. Between two tenants that both wait, the work given
differs by at most their largest requests (Goyal, Vin and Cheng, 1996). Work is estimated from the tenant's previous
requests when a request begins, and corrected when it ends. The module is pure: no clock, no I/O."""

from __future__ import annotations

import heapq

from kvferry.router.tenants.tenant import Tenant
from kvferry.router.tenants.tenant_queue import OUTPUT_WEIGHT, Slot, TenantQueue, Window, WindowUse

LEARNING_RATE = 0.2
"""Weight of the newest request in the estimate for the next."""
MIN_PROMPT = 16
"""Smallest prompt counted, in tokens: a step computes at least as many."""
MIN_ABANDONED = 32
"""Number of abandoned slots above which they are dropped, once they exceed half of a tenant's queue."""
MEMORY = 8
"""Multiple of the work in flight over which work given to tenants is forgotten."""
NEWCOMER_MARGIN = 2
"""Multiple of another tenant's work up to which a tenant is a newcomer.

The margin absorbs estimation errors, since the cost of a token differs between machines and loads: a tenant that keeps
to half of the nodes should not lose its place to them."""
NO_USE: WindowUse = (0.0, 0.0)
"""Use of nothing of the window."""
OVERCOMMIT = 2
"""Multiple of the window up to which tenants without requests in flight may start."""


class FairQueue:
    """Queue of slots of all tenants; `queued` counts those that wait.

    `add` creates a slot, `next` returns the slot that begins, `record_first_token` releases its prompt's part of the
    window, and `end` ends it, begun or not. A tenant's queue is kept forever once created."""

    def __init__(self) -> None:
        self.queued = 0
        self._queues: dict[str, TenantQueue] = {}
        self._virtual_time = self._last_finish = 0.0
        self._entered = self._running = 0
        self._sequences = self._prompt = self._in_flight = 0.0
        self._background: WindowUse = NO_USE

    def add(
        self, tenant: Tenant, sequences: int, prompt: int, most_output: int, priority: int = 0, *,
        background: bool = False, session: str = "",
    ) -> Slot:  # fmt: skip
        """Add a request with its sequences, prompt tokens, and at most `most_output` output tokens per sequence.

        Lower priorities go first within a tenant, then its sessions in turn. background: see Slot."""
        queue = self._queues.get(tenant.name)
        if queue is None:
            queue = self._queues[tenant.name] = TenantQueue(tenant)
        queue.tenant = tenant
        self._entered += 1
        expected = max(MIN_PROMPT, round(prompt * queue.fresh))
        output = sequences * min(most_output, queue.output)
        start = queue.start(session, expected + OUTPUT_WEIGHT * output)
        slot = Slot(queue, (priority, start, self._entered), sequences, expected, output, background=background)
        if len(queue.waiting) > 2 * queue.queued + MIN_ABANDONED:
            queue.waiting = sorted(other for other in queue.waiting if not other.ended)
        heapq.heappush(queue.waiting, slot)
        queue.queued += 1
        queue.work += slot.work
        self.queued += 1
        return slot

    def next(self, window: Window) -> Slot | None:
        """Begin and return the next slot; None if none may begin. O(tenants)."""
        if not self.queued:
            return None
        for queue in self._in_order():
            slot = queue.head()
            if slot is not None and self._fits(slot, used := _window_use(slot, window), window):
                self._begin(slot, used, window)
                return slot
        return None

    def record_first_token(self, slot: Slot, share: float) -> None:
        """Record the first token; `share` is the fraction of the prompt that was computed."""
        if not slot.computed:
            slot.computed = True
            slot.queue.fresh += LEARNING_RATE * (share - slot.queue.fresh)
            self._release_prompt(slot)

    def end(self, slot: Slot, prompt: float = 0.0, output: float = 0.0) -> None:
        """End a slot, with the prompt tokens computed and output tokens generated; may be called repeatedly."""
        if slot.ended:
            return
        slot.ended = True
        queue = slot.queue
        if not slot.begun:
            self._dequeue(slot)
        else:
            if slot.computed:
                queue.output += LEARNING_RATE * (output / slot.sequences - queue.output)
            else:
                self._release_prompt(slot)
            self._use(slot, -slot.used[0], 0.0)
            more = (prompt + OUTPUT_WEIGHT * output - slot.work) / queue.tenant.share
            queue.finish += more
            queue.given = max(0.0, queue.given + more)
            self._in_flight -= slot.work
            queue.in_flight -= slot.work
            self._running -= 1
            self._last_finish = max(self._last_finish, queue.finish)
        if not self._running and not self.queued:
            self._virtual_time = self._last_finish

    @property
    def work(self) -> float:
        """Return the work of all waiting slots, in tokens."""
        return sum(queue.work for queue in self._queues.values())

    def work_ahead(self, slot: Slot) -> float:
        """Estimate the work that begins before a waiting slot, in tokens. O(tenants + slots of its tenant)."""
        own = slot.queue
        before = sum(other.work for other in own.waiting if other < slot and not other.ended)
        per_share = (before + slot.work) / own.tenant.share
        for queue in self._queues.values():
            if queue is not own and queue.tenant.priority < own.tenant.priority:
                before += queue.work
            elif queue is not own and queue.tenant.priority == own.tenant.priority:
                before += min(queue.work, per_share * queue.tenant.share)
        return before

    def _in_order(self) -> list[TenantQueue]:
        queues = [queue for queue in self._queues.values() if queue.queued]
        if len(queues) > 1:
            queues.sort(
                key=lambda queue: (
                    queue.tenant.priority,
                    max(queue.finish, self._virtual_time),
                    queue.waiting[0].order[2],
                )
            )
        return queues

    def _fits(self, slot: Slot, used: WindowUse, window: Window) -> bool:
        """Return whether the window has space for the slot's use beside its tenant's work in flight.

        The part that background requests use counts only against other background requests, since they yield on the
        nodes. The first slot of a tenant with nothing in flight nearly always fits. So does a prompt of a tenant with
        little work in flight, which nodes compute before long prompts of other tenants."""
        queue, (sequences, prompt) = slot.queue, used
        if not window.shared and self._background == NO_USE:  # nearly always
            return self._sequences + sequences <= window.sequences and self._prompt + prompt <= window.prompt
        own, total = (queue.sequences, queue.prompt), (self._sequences, self._prompt)
        if not slot.background:
            own = own[0] - queue.background[0], own[1] - queue.background[1]
            total = total[0] - self._background[0], total[1] - self._background[1]
        had = 0.0 if window.shared and self._has_little_in_flight(slot) else own[1]
        return _fits_share(window.sequences, own[0], total[0] - own[0], sequences, window.shared) and _fits_share(
            window.prompt, had, total[1] - own[1], prompt, window.shared
        )

    def _has_little_in_flight(self, slot: Slot) -> bool:
        """Return whether its tenant's work in flight, with this slot, is at most half of all other tenants'."""
        own = slot.queue.in_flight
        return 2 * (own + slot.work) <= self._in_flight - own

    def _begin(self, slot: Slot, used: WindowUse, window: Window) -> None:
        queue = slot.queue
        heapq.heappop(queue.waiting)
        queue.now = max(queue.now, slot.order[1])
        self._dequeue(slot)
        slot.begun, slot.used = True, used
        slot.newcomer = window.shared and self._newcomer(slot)
        self._virtual_time = max(self._virtual_time, queue.finish)
        queue.finish = self._virtual_time + slot.work / queue.tenant.share
        self._last_finish = max(self._last_finish, queue.finish)
        self._running += 1
        self._charge(slot)
        self._use(slot, *used)

    def _newcomer(self, slot: Slot) -> bool:
        """Return whether the nodes should serve the slot's tenant first.

        This holds if the tenant has little in flight and was given at most NEWCOMER_MARGIN times the work of another
        active tenant."""
        own = slot.queue
        few = 2 * (own.sequences + slot.used[0]) <= self._sequences - own.sequences
        if not few and not self._has_little_in_flight(slot):
            return False
        most = max(queue.given for queue in self._queues.values() if queue is not own and queue.sequences)
        return own.given + slot.work / own.tenant.share <= NEWCOMER_MARGIN * most

    def _charge(self, slot: Slot) -> None:
        """Count the slot's work as given to its tenant, and let the work given earlier decay."""
        self._in_flight += slot.work
        slot.queue.in_flight += slot.work
        kept = 1 - slot.work / (MEMORY * self._in_flight)
        for queue in self._queues.values():
            queue.given *= kept
        slot.queue.given += slot.work / slot.queue.tenant.share

    def _dequeue(self, slot: Slot) -> None:
        slot.queue.queued -= 1
        slot.queue.work -= slot.work
        self.queued -= 1

    def _release_prompt(self, slot: Slot) -> None:
        self._use(slot, 0.0, -slot.used[1])

    def _use(self, slot: Slot, sequences: float, prompt: float) -> None:
        """Change the part of the window that a slot uses."""
        queue = slot.queue
        queue.sequences += sequences
        queue.prompt += prompt
        self._sequences += sequences
        self._prompt += prompt
        if slot.background:
            queue.background = queue.background[0] + sequences, queue.background[1] + prompt
            self._background = self._background[0] + sequences, self._background[1] + prompt


def _window_use(slot: Slot, window: Window) -> WindowUse:
    """Return the part of the window that the slot uses, capped at one tenant's maximum so that it can begin."""
    part = 2 if window.shared else 1
    return min(slot.sequences, window.sequences / part), min(slot.prompt, window.prompt / part)


def _fits_share(window: float, own: float, others: float, more: float, shared: bool) -> bool:
    """Return whether `more` fits into the window.

    In a shared window a tenant uses at most half of what the other tenants leave, so that one more always fits. With k
    tenants that want everything, each gets 1 / (k + 1)."""
    if own <= 0 and shared:
        return others < OVERCOMMIT * window
    left = window - others
    return own + more <= (left / 2 if shared else left)
