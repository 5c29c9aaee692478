"""Queue of one tenant: its waiting requests, its running ones and its concurrency window."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from kvferry.router.tenants.tenant import Tenant

OUTPUT_WEIGHT = 4.0
"""An output token counts as so many prompt tokens: prompts are computed many tokens at a time."""
FIRST_OUTPUT = 128.0
"""Output tokens expected of a tenant's first sequence."""


class Window(NamedTuple):
    """Bound on work in flight at the nodes: sequences, and prompt tokens whose first output token is not out.

    `shared`: leave some of it to tenants that have nothing under way."""

    sequences: float = inf
    prompt: float = inf
    shared: bool = False


@dataclass(slots=True, eq=False)
class TenantQueue:
    """Queue of one tenant.

    It holds what waits, by priority and arrival, as slots and as work; what of the window it has, and what is in
    flight, as work; the tag at which its next request starts; the work it was given lately, by its share; and what to
    expect of it: the share of a prompt that is not cached, and the output tokens of a sequence."""

    tenant: Tenant
    finish: float = 0.0
    waiting: list[Slot] = field(default_factory=list)
    queued: int = 0
    work: float = 0.0
    sequences: float = 0.0
    prompt: float = 0.0
    under_way: float = 0.0
    given: float = 0.0
    fresh: float = 1.0
    output: float = FIRST_OUTPUT

    def head(self) -> Slot | None:
        """The next to begin; those that left while they waited are dropped here."""
        while self.waiting and self.waiting[0].over:
            heapq.heappop(self.waiting)
        return self.waiting[0] if self.waiting else None


@dataclass(slots=True, eq=False)
class Slot:
    """A request's place in the queue, then among those under way.

    sequences, prompt, output  what it brings: sequences, prompt tokens expected to be computed, output tokens expected
    work                       the same in tokens of work
    newcomer                   as it began its tenant had been given little beside others, and had not half of the work
                               that is under way of theirs: the nodes should serve it before those
    """

    lane: TenantQueue
    order: tuple[int, int]
    sequences: int
    prompt: int
    output: float
    begun: bool = False
    computed: bool = False
    over: bool = False
    newcomer: bool = False
    counted: tuple[float, float] = (0.0, 0.0)

    @property
    def work(self) -> float:
        return self.prompt + OUTPUT_WEIGHT * self.output

    @property
    def at_once(self) -> int:
        """Return how many of its sequences may be at the nodes at a time."""
        return max(1, int(self.counted[0]))

    def __lt__(self, other: Slot) -> bool:
        return self.order < other.order
