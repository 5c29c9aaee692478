"""FairQueue: start-time fair queue of requests over tenants, weighted by tokens of work.

Every request has a start tag: its tenant's previous finish tag, or the current virtual time if that is later, so that
idle tenants gain neither credit nor debt. The lowest tag goes first. Between two tenants that both wait, the work given
differs by at most their largest requests (Goyal, Vin and Cheng, 1996). Work is estimated from the tenant's previous
requests when a request begins, and corrected when it ends. The module is pure: no clock, no I/O."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvferry.router.tenants.tenant import Tenant
from kvferry.router.tenants.tenant_queue import OUTPUT_WEIGHT, Part, Slot, TenantQueue, Window

LEARN = 0.2
"""Weight of the newest request in the estimate for the next."""
SMALLEST_PROMPT = 16
"""Smallest prompt counted, in tokens: a step computes at least as many."""
FEW_LEFT = 32
"""Abandoned slots are dropped once they exceed this number and half of a tenant's queue."""
MEMORY = 8
"""Work given to tenants is forgotten over this multiple of the work in flight."""
LENIENT = 2
"""A tenant is a newcomer until it was given this multiple of another tenant's work.

The margin absorbs estimation errors, since the cost of a token differs between machines and loads: a tenant that keeps
to half of the nodes should not lose its place to them."""
CROWD = 2
"""Tenants without requests in flight may start until this multiple of the window is used."""


class FairQueue:
    """Queue of slots of all tenants; `queued` counts those that wait.

    `enter` creates a slot, `next` returns the slot that begins, `compute` records its first token, and `leave` ends it,
    begun or not. A tenant's queue is kept forever once created."""

    def __init__(self) -> None:
        self.queued = 0
        self._lanes: dict[str, TenantQueue] = {}
        self._now = self._latest = 0.0
        self._entered = self._running = 0
        self._sequences = self._prompt = self._under_way = 0.0
        self._patient: Part = (0.0, 0.0)

    def enter(
        self, tenant: Tenant, sequences: int, prompt: int, most_output: int, priority: int = 0, *,
        patient: bool = False, session: str = "",
    ) -> Slot:  # fmt: skip
        """Add a request with its sequences, prompt tokens, and at most `most_output` output tokens per sequence.

        Lower priorities go first within a tenant, then its sessions in turn. patient: see Slot."""
        lane = self._lanes.get(tenant.name)
        if lane is None:
            lane = self._lanes[tenant.name] = TenantQueue(tenant)
        lane.tenant = tenant
        self._entered += 1
        expected = max(SMALLEST_PROMPT, round(prompt * lane.fresh))
        output = sequences * min(most_output, lane.output)
        start = lane.start(session, expected + OUTPUT_WEIGHT * output)
        turn = Slot(lane, (priority, start, self._entered), sequences, expected, output, patient=patient)
        if len(lane.waiting) > 2 * lane.queued + FEW_LEFT:
            lane.waiting = sorted(other for other in lane.waiting if not other.over)
        heapq.heappush(lane.waiting, turn)
        lane.queued += 1
        lane.work += turn.work
        self.queued += 1
        return turn

    def next(self, window: Window) -> Slot | None:
        """Begin and return the next slot; None if none may begin. O(tenants)."""
        if not self.queued:
            return None
        for lane in self._in_order():
            turn = lane.head()
            if turn is not None and self._fits(turn, window):
                self._begin(turn, window)
                return turn
        return None

    def compute(self, turn: Slot, share: float) -> None:
        """Record the first token; `share` is the fraction of the prompt that was computed."""
        if not turn.computed:
            turn.computed = True
            turn.lane.fresh += LEARN * (share - turn.lane.fresh)
            self._uncount_prompt(turn)

    def leave(self, turn: Slot, prompt: float = 0.0, output: float = 0.0) -> None:
        """End a slot, with the prompt tokens computed and output tokens generated; may be called repeatedly."""
        if turn.over:
            return
        turn.over = True
        lane = turn.lane
        if not turn.begun:
            self._unqueue(turn)
        else:
            if turn.computed:
                lane.output += LEARN * (output / turn.sequences - lane.output)
            else:
                self._uncount_prompt(turn)
            self._hold(turn, -turn.counted[0], 0.0)
            more = (prompt + OUTPUT_WEIGHT * output - turn.work) / lane.tenant.share
            lane.finish += more
            lane.given = max(0.0, lane.given + more)
            self._under_way -= turn.work
            lane.under_way -= turn.work
            self._running -= 1
            self._latest = max(self._latest, lane.finish)
        if not self._running and not self.queued:
            self._now = self._latest

    @property
    def work(self) -> float:
        """Return the work of all waiting slots, in tokens."""
        return sum(lane.work for lane in self._lanes.values())

    def ahead(self, turn: Slot) -> float:
        """Estimate the work that begins before a waiting slot, in tokens. O(tenants + slots of its tenant)."""
        own = turn.lane
        before = sum(other.work for other in own.waiting if other < turn and not other.over)
        per_share = (before + turn.work) / own.tenant.share
        for lane in self._lanes.values():
            if lane is not own and lane.tenant.priority < own.tenant.priority:
                before += lane.work
            elif lane is not own and lane.tenant.priority == own.tenant.priority:
                before += min(lane.work, per_share * lane.tenant.share)
        return before

    def _in_order(self) -> Iterator[TenantQueue]:
        lanes = [lane for lane in self._lanes.values() if lane.queued]
        if len(lanes) > 1:
            lanes.sort(key=lambda lane: (lane.tenant.priority, max(lane.finish, self._now), lane.waiting[0].order[2]))
        yield from lanes

    def _fits(self, turn: Slot, window: Window) -> bool:
        """Return whether the window has space for the slot beside its tenant's work in flight.

        What patient requests use counts only against other patient ones, since they give way on the nodes. The first
        slot of a tenant with nothing in flight nearly always fits. So does a prompt of a tenant with little work in
        flight, which nodes compute before long prompts of other tenants."""
        lane = turn.lane
        sequences, prompt = _counted(turn, window)
        own, total = (lane.sequences, lane.prompt), (self._sequences, self._prompt)
        if not turn.patient:
            own = own[0] - lane.patient[0], own[1] - lane.patient[1]
            total = total[0] - self._patient[0], total[1] - self._patient[1]
        had = 0.0 if window.shared and self._little(turn) else own[1]
        return _roomy(window.sequences, own[0], total[0] - own[0], sequences, window.shared) and _roomy(
            window.prompt, had, total[1] - own[1], prompt, window.shared
        )

    def _little(self, turn: Slot) -> bool:
        """Return whether its tenant's work in flight, with this slot, is at most half of all other tenants'."""
        own = turn.lane.under_way
        return 2 * (own + turn.work) <= self._under_way - own

    def _begin(self, turn: Slot, window: Window) -> None:
        lane = turn.lane
        heapq.heappop(lane.waiting)
        lane.now = max(lane.now, turn.order[1])
        self._unqueue(turn)
        turn.begun, turn.counted = True, _counted(turn, window)
        turn.newcomer = window.shared and self._newcomer(turn)
        self._now = max(self._now, lane.finish)
        lane.finish = self._now + turn.work / lane.tenant.share
        self._latest = max(self._latest, lane.finish)
        self._running += 1
        self._give(turn)
        self._hold(turn, *turn.counted)

    def _newcomer(self, turn: Slot) -> bool:
        """Return whether the nodes should serve the slot's tenant first.

        This holds if the tenant has little in flight and was given at most LENIENT times the work of another active
        tenant."""
        own = turn.lane
        few = 2 * (own.sequences + turn.counted[0]) <= self._sequences - own.sequences
        if not few and not self._little(turn):
            return False
        most = max(lane.given for lane in self._lanes.values() if lane is not own and lane.sequences)
        return own.given + turn.work / own.tenant.share <= LENIENT * most

    def _give(self, turn: Slot) -> None:
        """Count the slot's work as given to its tenant, and let the work given earlier decay."""
        self._under_way += turn.work
        turn.lane.under_way += turn.work
        kept = 1 - turn.work / (MEMORY * self._under_way)
        for lane in self._lanes.values():
            lane.given *= kept
        turn.lane.given += turn.work / turn.lane.tenant.share

    def _unqueue(self, turn: Slot) -> None:
        turn.lane.queued -= 1
        turn.lane.work -= turn.work
        self.queued -= 1

    def _uncount_prompt(self, turn: Slot) -> None:
        self._hold(turn, 0.0, -turn.counted[1])

    def _hold(self, turn: Slot, sequences: float, prompt: float) -> None:
        """Change the part of the window that a slot uses."""
        lane = turn.lane
        lane.sequences += sequences
        lane.prompt += prompt
        self._sequences += sequences
        self._prompt += prompt
        if turn.patient:
            lane.patient = lane.patient[0] + sequences, lane.patient[1] + prompt
            self._patient = self._patient[0] + sequences, self._patient[1] + prompt


def _counted(turn: Slot, window: Window) -> tuple[float, float]:
    """Return the part of the window that the slot uses, capped at one tenant's maximum so that it can begin."""
    part = 2 if window.shared else 1
    return min(turn.sequences, window.sequences / part), min(turn.prompt, window.prompt / part)


def _roomy(window: float, own: float, others: float, more: float, shared: bool) -> bool:
    """Return whether `more` fits into the window.

    In a shared window a tenant uses at most half of what the other tenants leave, so that one more always fits. With k
    tenants that want everything, each gets 1 / (k + 1)."""
    if own <= 0 and shared:
        return others < CROWD * window
    left = window - others
    return own + more <= (left / 2 if shared else left)
