"""TenantQueue: one tenant's waiting slots and work in flight, as FairQueue orders them; Slot and Window."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from kvferry.router.tenants.tenant import Tenant

OUTPUT_WEIGHT = 4.0
"""Cost of an output token in prompt tokens, which are computed many at a time."""
FIRST_OUTPUT = 128.0
"""Expected output tokens of a tenant's first sequence."""

MAX_SESSIONS = 1024
"""Maximum number of a tenant's sessions whose finish tags are kept; the least recent ones are dropped."""


class Window(NamedTuple):
    """Bound on work in flight on the nodes: sequences, and prompt tokens of requests without a first token.

    `shared`: part of it is reserved for tenants that have nothing in flight."""

    sequences: float = inf
    prompt: float = inf
    shared: bool = False


WindowUse = tuple[float, float]
"""Part of the window: sequences and prompt tokens."""


@dataclass(slots=True, eq=False)
class TenantQueue:
    """Queue of one tenant.

    finish             start tag of its next request
    waiting            waiting slots by priority and arrival, some of them abandoned
    queued, work       number and work of the waiting slots
    sequences, prompt  its part of the window
    background         part of these that its background requests use
    in_flight          its work in flight
    given              recent work given, divided by its share
    fresh              expected fraction of a prompt that is not cached
    output             expected output tokens of a sequence
    now, sessions      highest start tag that began, and finish tags of its sessions
    """

    tenant: Tenant
    finish: float = 0.0
    waiting: list[Slot] = field(default_factory=list)
    queued: int = 0
    work: float = 0.0
    sequences: float = 0.0
    prompt: float = 0.0
    background: WindowUse = (0.0, 0.0)
    in_flight: float = 0.0
    given: float = 0.0
    fresh: float = 1.0
    output: float = FIRST_OUTPUT
    now: float = 0.0
    sessions: dict[str, float] = field(default_factory=dict)

    def start(self, session: str, work: float) -> float:
        """Return the start tag of a request of a session: the session's last finish tag, or `now` if that is later.

        So a busy session waits for its own earlier requests, and does not delay the tenant's other sessions."""
        start = max(self.now, self.sessions.get(session, 0.0)) if session else self.now
        if session:
            if len(self.sessions) >= MAX_SESSIONS:
                for oldest in list(self.sessions)[: MAX_SESSIONS // 2]:
                    del self.sessions[oldest]
            self.sessions.pop(session, None)
            self.sessions[session] = start + work
        return start

    def head(self) -> Slot | None:
        """Return the next slot to begin, and drop abandoned ones before it."""
        while self.waiting and self.waiting[0].ended:
            heapq.heappop(self.waiting)
        return self.waiting[0] if self.waiting else None


@dataclass(slots=True, eq=False)
class Slot:
    """A request's place in the queue, then among those in flight.

    sequences, prompt, output  sequences, and expected prompt tokens to compute and output tokens
    work                       the same in tokens of work
    newcomer                   the nodes should serve it first, as its tenant had received little work when it began
    background                 it yields on the nodes, so that other requests may use its part of the window
    """

    queue: TenantQueue
    order: tuple[int, float, int]
    sequences: int
    prompt: int
    output: float
    begun: bool = False
    computed: bool = False
    ended: bool = False
    newcomer: bool = False
    background: bool = False
    used: WindowUse = (0.0, 0.0)
    work: float = field(init=False)

    def __post_init__(self) -> None:
        self.work = self.prompt + OUTPUT_WEIGHT * self.output

    @property
    def at_once(self) -> int:
        """Return how many of its sequences may run on the nodes at a time."""
        return max(1, int(self.used[0]))

    def __lt__(self, other: Slot) -> bool:
        return self.order < other.order
