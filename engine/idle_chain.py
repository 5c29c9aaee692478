"""IdleChain: cached blocks that one request left, evicted from its end; AgedChains orders chains by class and age."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count

from kvferry.engine.return_rates import BINS, ENDS, ReturnRates


@dataclass(slots=True, eq=False)
class IdleChain:
    """Blocks that one request left and that have the same class.

    tenant, kind  of its class, and the class's return rates; retention: as in CacheUse
    at            time at which the request left them, in seconds; since: until which time they are counted
    unit          weight of one block in the rates: its share of what the request left
    prompt        blocks of the request's prompt; shared: the leading ones that several sessions use
    turns         earlier requests of the session
    place         age bin
    idle, dropped blocks in the pool without a user, and evicted blocks that are remembered
    leaves        idle blocks without children; the last one is evicted first
    closed        its session is closed; queued: it is among the chains that have leaves"""

    tenant: str
    kind: str
    rates: ReturnRates
    at: float
    unit: float = 1.0
    prompt: int = 1
    shared: int = 0
    turns: int = 0
    retention: str = ""
    since: float = 0.0
    place: int = 0
    idle: int = 0
    dropped: int = 0
    leaves: dict[int, None] = field(default_factory=dict)
    closed: bool = False
    queued: bool = False

    def __post_init__(self) -> None:
        self.since = self.at

    def settle(self, now: float) -> None:
        """Count the time that its blocks have spent in the current age bin."""
        if now > self.since:
            self.rates.exposed(self.place, now - self.since, (self.idle + self.dropped) * self.unit)
            self.since = now

    def returned(self, now: float, blocks: int) -> None:
        """Count blocks that are used again; the caller then changes `idle` or `dropped`."""
        self.settle(now)
        self.rates.returned(self.place, blocks * self.unit)

    def lost(self, now: float) -> None:
        """Forget one evicted block."""
        self.settle(now)
        self.dropped -= 1
        self.rates.lost(self.unit)


MAX_MOVES = 512
"""Maximum number of chains that change groups in one call, so that a request after a long idle time does not wait."""
Group = tuple[ReturnRates, int]
"""Class and age bin of chains whose blocks are worth the same."""


class AgedChains:
    """Chains that have leaves, grouped by class and age, and the least valuable of them.

    A chain changes its group at most BINS times; each change is O(log n)."""

    def __init__(self) -> None:
        self._groups: dict[Group, dict[IdleChain, None]] = {}
        self._closed: dict[IdleChain, None] = {}
        self._order: list[tuple[float, int, Group]] = []
        self._timers: list[tuple[float, int, IdleChain]] = []
        self._numbers = count()

    def watch(self, chain: IdleChain) -> None:
        """Let the chain age as long as it has blocks."""
        if chain.place < BINS - 1:
            heapq.heappush(self._timers, (chain.at + ENDS[chain.place], next(self._numbers), chain))

    def add(self, chain: IdleChain) -> None:
        """Enter a chain that has leaves, unless it is here."""
        if chain.queued:
            return
        chain.queued = True
        if chain.closed:
            self._closed[chain] = None
            return
        key = chain.rates, chain.place
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = {}
            heapq.heappush(self._order, self._ranked(key))
        group[chain] = None

    def remove(self, chain: IdleChain) -> None:
        """Remove a chain, for instance because its last leaf is used; ignored if it is not here."""
        if not chain.queued:
            return
        chain.queued = False
        if chain.closed:
            del self._closed[chain]
            return
        key = chain.rates, chain.place
        del self._groups[key][chain]
        if not self._groups[key]:
            del self._groups[key]

    def age(self, now: float) -> None:
        """Move chains that have reached the end of their age bin, MAX_MOVES at most."""
        for _ in range(MAX_MOVES):
            if not self._timers or self._timers[0][0] > now:
                return
            chain = heapq.heappop(self._timers)[2]
            if not chain.idle + chain.dropped:
                continue
            queued = chain.queued
            self.remove(chain)
            while chain.place < BINS - 1 and chain.at + ENDS[chain.place] <= now:
                chain.settle(chain.at + ENDS[chain.place])
                chain.place += 1
            if queued:
                self.add(chain)
            self.watch(chain)

    def rank(self) -> None:
        """Recompute the values of all groups."""
        self._order = [self._ranked(key) for key in self._groups]
        heapq.heapify(self._order)

    def cheapest(self) -> IdleChain:
        """Return the chain whose leaf is worth least; of equal ones, the first added. Raises KeyError."""
        if self._closed:
            return next(iter(self._closed))
        while self._order:
            if group := self._groups.get(self._order[0][2]):
                return next(iter(group))
            heapq.heappop(self._order)
        raise KeyError("no block can be evicted")

    def _ranked(self, key: Group) -> tuple[float, int, Group]:
        rates, place = key
        return rates.values()[place], next(self._numbers), key
