"""Start-time fair queue over tenants, weighted by tokens of work.

Every request has a start tag: what its tenant had used before it, or what tenants are at now if that is more, so that
anyone who comes after a pause has no credit and no debt. The least tag goes first. Between two tenants that both wait,
the work they were given differs by no more than their largest requests, whatever they ask for (Goyal, Vin and Cheng,
1996). Work is guessed when a request begins, by what the tenant's last ones took, and put right when it ends. Pure: no
clock, no I/O.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvferry.router.tenants.tenant import Tenant
from kvferry.router.tenants.tenant_queue import OUTPUT_WEIGHT, Slot, TenantQueue, Window

LEARN = 0.2
"""Weight of the newest request in what is expected of the next."""
SMALLEST_PROMPT = 16
"""Tokens: less than a step computes anyway counts as this."""
FEW_LEFT = 32
"""Turns that left while they waited are dropped once there are more than this and half of all."""
MEMORY = 8
"""What a tenant was given is forgotten over so many times the work that is under way."""
LENIENT = 2
"""A tenant is a newcomer until it was given so many times what another was: how much work a token is differs between
machines and loads, and anyone who keeps to half of the nodes should never lose its place to an error of the count."""
CROWD = 2
"""Tenants with nothing under way may begin until this multiple of the window is full."""


class FairQueue:
    """`enter` makes a turn, `next` says whose begins, `compute` that its first token is out, `leave` ends it, begun or
    not. `queued` counts those that wait. A tenant's lane is kept once it has one."""

    def __init__(self) -> None:
        self.queued = 0
        self._lanes: dict[str, TenantQueue] = {}
        self._now = self._latest = 0.0
        self._entered = self._running = 0
        self._sequences = self._prompt = self._under_way = 0.0

    def enter(self, tenant: Tenant, sequences: int, prompt: int, most_output: int, priority: int = 0) -> Slot:
        """A request of so many sequences and prompt tokens, with at most `most_output` output tokens for each sequence.

        Lower priorities go first within a tenant."""
        lane = self._lanes.get(tenant.name)
        if lane is None:
            lane = self._lanes[tenant.name] = TenantQueue(tenant)
        lane.tenant = tenant
        self._entered += 1
        expected = max(SMALLEST_PROMPT, round(prompt * lane.fresh))
        turn = Slot(lane, (priority, self._entered), sequences, expected, sequences * min(most_output, lane.output))
        if len(lane.waiting) > 2 * lane.queued + FEW_LEFT:
            lane.waiting = sorted(other for other in lane.waiting if not other.over)
        heapq.heappush(lane.waiting, turn)
        lane.queued += 1
        lane.work += turn.work
        self.queued += 1
        return turn

    def next(self, window: Window) -> Slot | None:
        """The turn that begins now; None while nobody's may. O(tenants)."""
        if not self.queued:
            return None
        for lane in self._in_order():
            turn = lane.head()
            if turn is not None and self._fits(turn, window):
                self._begin(turn, window)
                return turn
        return None

    def compute(self, turn: Slot, share: float) -> None:
        """The first token is out, and this share of the prompt's tokens was computed for it."""
        if not turn.computed:
            turn.computed = True
            turn.lane.fresh += LEARN * (share - turn.lane.fresh)
            self._uncount_prompt(turn)

    def leave(self, turn: Slot, prompt: float = 0.0, output: float = 0.0) -> None:
        """It ended, or gave up its place: so many tokens were computed and put out. May be called again."""
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
            lane.sequences -= turn.counted[0]
            self._sequences -= turn.counted[0]
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
        """Tokens of work of all that wait."""
        return sum(lane.work for lane in self._lanes.values())

    def ahead(self, turn: Slot) -> float:
        """Tokens of work that are likely to begin before a turn that waits. O(tenants + turns of its own)."""
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
            lanes.sort(key=lambda lane: (lane.tenant.priority, max(lane.finish, self._now), lane.waiting[0].order[1]))
        yield from lanes

    def _fits(self, turn: Slot, window: Window) -> bool:
        """Return whether there is room for it: for its tenant's next beside what that has under way, and for the first
        of one that has nothing under way nearly always. So it is for a prompt of one that has little: nodes compute it
        before the long ones of others."""
        lane = turn.lane
        sequences, prompt = _counted(turn, window)
        had = 0.0 if window.shared and self._little(turn) else lane.prompt
        others = self._sequences - lane.sequences
        return _roomy(window.sequences, lane.sequences, others, sequences, window.shared) and _roomy(
            window.prompt, had, self._prompt - lane.prompt, prompt, window.shared
        )

    def _little(self, turn: Slot) -> bool:
        """Return whether its tenant has, with it, not half of the work that is under way of others."""
        own = turn.lane.under_way
        return 2 * (own + turn.work) <= self._under_way - own

    def _begin(self, turn: Slot, window: Window) -> None:
        lane = turn.lane
        heapq.heappop(lane.waiting)
        self._unqueue(turn)
        turn.begun, turn.counted = True, _counted(turn, window)
        turn.newcomer = window.shared and self._newcomer(turn)
        self._now = max(self._now, lane.finish)
        lane.finish = self._now + turn.work / lane.tenant.share
        self._latest = max(self._latest, lane.finish)
        self._running += 1
        self._give(turn)
        lane.sequences += turn.counted[0]
        lane.prompt += turn.counted[1]
        self._sequences += turn.counted[0]
        self._prompt += turn.counted[1]

    def _newcomer(self, turn: Slot) -> bool:
        """Return whether its tenant was given less than LENIENT times what another was, of those whose requests are
        under way, and has little there."""
        own = turn.lane
        few = 2 * (own.sequences + turn.counted[0]) <= self._sequences - own.sequences
        if not few and not self._little(turn):
            return False
        most = max(lane.given for lane in self._lanes.values() if lane is not own and lane.sequences)
        return own.given + turn.work / own.tenant.share <= LENIENT * most

    def _give(self, turn: Slot) -> None:
        """Its tenant is given its work; of what all were given before a part is forgotten."""
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
        turn.lane.prompt -= turn.counted[1]
        self._prompt -= turn.counted[1]


def _counted(turn: Slot, window: Window) -> tuple[float, float]:
    """What it takes of the window: never more than one tenant may have, or it would never begin."""
    part = 2 if window.shared else 1
    return min(turn.sequences, window.sequences / part), min(turn.prompt, window.prompt / part)


def _roomy(window: float, own: float, others: float, more: float, shared: bool) -> bool:
    """Where it is shared a tenant takes at most half of what the others leave, so that of any number something is left
    for one more; with k tenants that want all, each has 1 / (k + 1)."""
    if own <= 0 and shared:
        return others < CROWD * window
    left = window - others
    return own + more <= (left / 2 if shared else left)
