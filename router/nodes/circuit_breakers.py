"""Circuit breakers of nodes and of node pairs, with half-open probes, shared by all requests of a router.

A subject is a node, or a pair of a prefill and a decode node whose link failed. One that failed is shut for a moment;
then one attempt at a time tries it, and each that fails shuts it for twice as long. The first success forgets all but
blocks that came corrupt (router/nodes/quarantine.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from kvferry.placement.types import NodeKey, Pair, Placement
from kvferry.router.nodes.quarantine import Quarantine

log = logging.getLogger(__name__)

PAUSE_S = (2.0, 30.0)
"""Shortest and longest time for which a subject is shut."""
MEMORY_S = 60.0
"""So long after its last failure a subject is as good as any other."""

S = TypeVar("S", NodeKey, Pair)


class OpenBreakers(NamedTuple):
    """Nodes and pairs with an open breaker.

    Pairs as in `placement.types.Demand`. Pairs as in `placement.types.Demand`."""

    nodes: frozenset[NodeKey] = frozenset()
    pairs: frozenset[Pair] = frozenset()


class RemainingPauses(NamedTuple):
    """Seconds by subject: nodes, pairs whose ships fail, pairs in quarantine."""

    nodes: Mapping[NodeKey, float]
    pairs: Mapping[Pair, float]
    quarantined: Mapping[Pair, float]


@dataclass(slots=True)
class Breaker:
    """Circuit breaker of one subject that failed.

    until: shut before; 0: never was. pause_s: for how long the next failure shuts it. doubted: whether it failed in a
    way that may have been chance. tried: whether an attempt goes there to see."""

    failed_at: float
    until: float = 0.0
    pause_s: float = PAUSE_S[0]
    doubted: bool = False
    tried: bool = False


class BreakerTable(Generic[S]):
    """Circuit breakers of one kind of subject."""

    def __init__(self) -> None:
        self._known: dict[S, Breaker] = {}

    def __len__(self) -> int:
        return len(self._known)

    def fail(self, subject: S, now: float, surely: bool = True) -> None:
        """Record a failure; a late failure of an attempt sent before the breaker opened does not count."""
        known = self._known.get(subject)
        if known is None or now - known.failed_at > MEMORY_S:
            known = self._known[subject] = Breaker(now)
        known.failed_at = now
        if not surely and not known.until and not known.doubted:
            known.doubted = True
        elif known.until <= now or known.tried:
            log.warning("%s failed: nothing new goes there for %g s", subject, known.pause_s)
            known.until, known.pause_s, known.tried = now + known.pause_s, min(2 * known.pause_s, PAUSE_S[1]), False

    def use(self, subject: S, now: float) -> None:
        """An attempt goes there. If the time is over for which it was shut, it is the one that tries it."""
        known = self._known.get(subject)
        if known is not None and 0 < known.until <= now:
            known.until, known.tried = now + known.pause_s, True

    def forget(self, subject: S) -> None:
        self._known.pop(subject, None)

    def shut(self, now: float) -> frozenset[S]:
        for subject in [each for each, known in self._known.items() if now - known.failed_at > MEMORY_S]:
            del self._known[subject]
        return frozenset(subject for subject, known in self._known.items() if known.until > now)

    def left(self, now: float) -> dict[S, float]:
        """Return the open breakers, with the seconds until each closes."""
        return {subject: known.until - now for subject, known in self._known.items() if known.until > now}

    def failing(self) -> list[S]:
        """Return subjects whose breaker opened and that have not worked since."""
        return [subject for subject, known in self._known.items() if known.until]


class CircuitBreakers:
    """Shared by all dispatches.

    `clock`: seconds, monotonic. `any`: whether there is anything to ask or to tell. `on_quarantine` hears of every
    quarantine that begins."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, on_quarantine: Callable[[], None] | None = None
    ) -> None:
        self.any = False
        self.quarantine = Quarantine(clock, on_quarantine)
        self._clock = clock
        self._nodes: BreakerTable[NodeKey] = BreakerTable()
        self._pairs: BreakerTable[Pair] = BreakerTable()

    def node_failed(self, node: NodeKey, *, surely: bool = True) -> None:
        """It cannot be reached, or does not answer. Not `surely`: it may be late only; another time shuts it."""
        self.any = True
        self._nodes.fail(node, self._clock(), surely)

    def pair_failed(self, prefill: NodeKey, decode: NodeKey, *, surely: bool = True) -> None:
        """Blocks do not come from the one to the other. Who fails with two is at fault with all."""
        self.any, now = True, self._clock()
        self._pairs.fail((prefill, decode), now, surely)
        failing = [pair for pair in self._pairs.failing() if None not in pair]
        if sum(pair[1] == decode for pair in failing) > 1:
            self._pairs.fail((None, decode), now)
        if sum(pair[0] == prefill for pair in failing) > 1:
            self._pairs.fail((prefill, None), now)

    def corrupt(self, sender: NodeKey, receiver: NodeKey) -> None:
        """Blocks came from the one to the other with other bytes than were sent."""
        self.any = True
        self.quarantine.corrupt(sender, receiver)

    def node_works(self, node: NodeKey) -> None:
        self._nodes.forget(node)
        self._note()

    def pair_works(self, prefill: NodeKey, decode: NodeKey) -> None:
        for pair in _pairs(prefill, decode):
            self._pairs.forget(pair)
        self._note()

    def decodes(self, place: Placement) -> None:
        """Tokens come from the decode node of an attempt placed so: it has all that it needs."""
        assert place.decode
        decode = (place.decode.node_id, place.decode.epoch)
        self.node_works(decode)
        if place.prefill:
            self.pair_works((place.prefill.node_id, place.prefill.epoch), decode)

    def use(self, prefill: NodeKey | None, decode: NodeKey | None) -> None:
        """An attempt goes there."""
        now = self._clock()
        for node in (prefill, decode):
            if node is not None:
                self._nodes.use(node, now)
        if prefill is not None and decode is not None:
            for pair in _pairs(prefill, decode):
                self._pairs.use(pair, now)

    def shut(self) -> OpenBreakers:
        now = self._clock()
        shut = OpenBreakers(self._nodes.shut(now), self._pairs.shut(now) | self.quarantine.shut())
        self._note()
        return shut

    def left(self) -> RemainingPauses:
        """Return for how many seconds nodes and pairs are still excluded."""
        now = self._clock()
        return RemainingPauses(self._nodes.left(now), self._pairs.left(now), self.quarantine.left())

    def _note(self) -> None:
        self.any = bool(len(self._nodes) or len(self._pairs) or self.quarantine)


def _pairs(prefill: NodeKey, decode: NodeKey) -> tuple[Pair, Pair, Pair]:
    return (prefill, decode), (None, decode), (prefill, None)
