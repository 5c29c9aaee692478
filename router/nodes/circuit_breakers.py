"""CircuitBreakers: breakers of nodes and node pairs with half-open probes, shared by all requests of a router.

A subject is a node, or a pair of a prefill and a decode node whose link failed. A failure opens the subject's breaker
for a pause. After it, one attempt at a time probes the subject, and each failed probe doubles the pause. The first
success clears the breaker, but not the count of corrupted blocks (router/nodes/quarantine.py)."""

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
"""Shortest and longest pause of an open breaker, in seconds."""
MEMORY_S = 60.0
"""Time after the last failure at which a breaker is forgotten, in seconds."""

S = TypeVar("S", NodeKey, Pair)


class OpenBreakers(NamedTuple):
    """Nodes and pairs with an open breaker; pairs have the form of those in `placement.types.Demand`."""

    nodes: frozenset[NodeKey] = frozenset()
    pairs: frozenset[Pair] = frozenset()


class RemainingPauses(NamedTuple):
    """Remaining seconds per subject: nodes, pairs whose transfers fail, and pairs in quarantine."""

    nodes: Mapping[NodeKey, float]
    pairs: Mapping[Pair, float]
    quarantined: Mapping[Pair, float]


@dataclass(slots=True)
class Breaker:
    """Circuit breaker of one subject that failed.

    until    time until which it is open; 0 if it never opened
    pause_s  pause that the next failure causes, in seconds
    suspected  true after one failure that may have been chance
    probed   true while an attempt probes the subject
    """

    failed_at: float
    until: float = 0.0
    pause_s: float = PAUSE_S[0]
    suspected: bool = False
    probed: bool = False


class BreakerTable(Generic[S]):
    """Circuit breakers of one kind of subject."""

    def __init__(self) -> None:
        self._known: dict[S, Breaker] = {}

    def __len__(self) -> int:
        return len(self._known)

    def fail(self, subject: S, now: float, certain: bool = True) -> None:
        """Record a failure; one of an attempt that was sent before the breaker opened does not count.

        certain: if false, only the second failure opens the breaker."""
        breaker = self._known.get(subject)
        if breaker is None or now - breaker.failed_at > MEMORY_S:
            breaker = self._known[subject] = Breaker(now)
        breaker.failed_at = now
        if not certain and not breaker.until and not breaker.suspected:
            breaker.suspected = True
        elif breaker.until <= now or breaker.probed:
            log.warning("%s failed: no new requests go there for %g s", subject, breaker.pause_s)
            breaker.until, breaker.pause_s, breaker.probed = (
                now + breaker.pause_s,
                min(2 * breaker.pause_s, PAUSE_S[1]),
                False,
            )

    def use(self, subject: S, now: float) -> None:
        """Record that an attempt uses the subject; after the pause this attempt is the probe."""
        breaker = self._known.get(subject)
        if breaker is not None and 0 < breaker.until <= now:
            breaker.until, breaker.probed = now + breaker.pause_s, True

    def forget(self, subject: S) -> None:
        """Clear the subject's breaker."""
        self._known.pop(subject, None)

    def open(self, now: float) -> frozenset[S]:
        """Return the subjects with an open breaker, and drop old breakers."""
        for subject in [each for each, breaker in self._known.items() if now - breaker.failed_at > MEMORY_S]:
            del self._known[subject]
        return frozenset(subject for subject, breaker in self._known.items() if breaker.until > now)

    def remaining(self, now: float) -> dict[S, float]:
        """Return the open breakers, with the seconds until each closes."""
        return {subject: breaker.until - now for subject, breaker in self._known.items() if breaker.until > now}

    def failing(self) -> list[S]:
        """Return subjects whose breaker opened and that have not worked since."""
        return [subject for subject, breaker in self._known.items() if breaker.until]


class CircuitBreakers:
    """Circuit breakers of all nodes and pairs, shared by all dispatches.

    clock          monotonic seconds
    any            true while any breaker or quarantine exists
    on_quarantine  called at the beginning of every quarantine
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, on_quarantine: Callable[[], None] | None = None
    ) -> None:
        self.any = False
        self.quarantine = Quarantine(clock, on_quarantine)
        self._clock = clock
        self._nodes: BreakerTable[NodeKey] = BreakerTable()
        self._pairs: BreakerTable[Pair] = BreakerTable()

    def node_failed(self, node: NodeKey, *, certain: bool = True) -> None:
        """Record that the node is unreachable or silent; unless `certain`, only a second failure opens the breaker."""
        self.any = True
        self._nodes.fail(node, self._clock(), certain)

    def pair_failed(self, prefill: NodeKey, decode: NodeKey, *, certain: bool = True) -> None:
        """Record that transfers from one node to the other fail.

        A node that fails with two peers is considered at fault for all its pairs."""
        self.any, now = True, self._clock()
        self._pairs.fail((prefill, decode), now, certain)
        failing = [pair for pair in self._pairs.failing() if None not in pair]
        if sum(pair[1] == decode for pair in failing) > 1:
            self._pairs.fail((None, decode), now)
        if sum(pair[0] == prefill for pair in failing) > 1:
            self._pairs.fail((prefill, None), now)

    def late(self, place: Placement, *, ships: bool) -> None:
        """Suspect the node that computes a late prompt or, if its first token came but its blocks did not, the pair."""
        nodes = [(node.node_id, node.epoch) for node in (place.prefill, place.decode) if node]
        if ships and len(nodes) > 1:
            self.pair_failed(*nodes, certain=False)
        else:
            self.node_failed(nodes[0], certain=False)

    def corrupt(self, sender: NodeKey, receiver: NodeKey) -> None:
        """Record that the bytes of received blocks differ from those that were sent."""
        self.any = True
        self.quarantine.corrupt(sender, receiver)

    def node_works(self, node: NodeKey) -> None:
        """Clear the node's breaker after a success."""
        self._nodes.forget(node)
        self._update()

    def pair_works(self, prefill: NodeKey, decode: NodeKey) -> None:
        """Clear the breakers of the pair after a success."""
        for pair in _pairs(prefill, decode):
            self._pairs.forget(pair)
        self._update()

    def decodes(self, place: Placement) -> None:
        """Record that the decode node of this placement delivers tokens, so it has received all blocks."""
        assert place.decode
        decode = (place.decode.node_id, place.decode.epoch)
        self.node_works(decode)
        if place.prefill:
            self.pair_works((place.prefill.node_id, place.prefill.epoch), decode)

    def use(self, prefill: NodeKey | None, decode: NodeKey | None) -> None:
        """Record that an attempt uses these nodes."""
        now = self._clock()
        for node in (prefill, decode):
            if node is not None:
                self._nodes.use(node, now)
        if prefill is not None and decode is not None:
            for pair in _pairs(prefill, decode):
                self._pairs.use(pair, now)

    def open(self) -> OpenBreakers:
        """Return the nodes and pairs with an open breaker or in quarantine, which placement avoids."""
        now = self._clock()
        breakers = OpenBreakers(self._nodes.open(now), self._pairs.open(now) | self.quarantine.open())
        self._update()
        return breakers

    def remaining(self) -> RemainingPauses:
        """Return the seconds for which nodes and pairs remain excluded."""
        now = self._clock()
        return RemainingPauses(self._nodes.remaining(now), self._pairs.remaining(now), self.quarantine.remaining())

    def _update(self) -> None:
        self.any = bool(len(self._nodes) or len(self._pairs) or self.quarantine)


def _pairs(prefill: NodeKey, decode: NodeKey) -> tuple[Pair, Pair, Pair]:
    return (prefill, decode), (None, decode), (prefill, None)
