"""Quarantine: excludes node pairs, or a node from all shipping, after repeated corrupt blocks (circuit_breakers.py).

The bytes of a received block differ from those that were sent, or that the receiver computes itself, if memory, a card
or a wire fails, or a node is misconfigured. Checksums find differences in transit, and another attempt computes the
blocks again, so no client notices. Not all blocks need have a checksum, however, and faulty hardware gets worse.
Canaries find some of the wrongly computed blocks. One corrupt ship may be chance; successes in between prove
nothing."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from kvferry.placement.types import NodeKey, Pair

log = logging.getLogger(__name__)

CORRUPT_SHIPS, WITHIN_S = 3, 600.0
"""Number of corrupt ships within WITHIN_S seconds that starts a quarantine of WITHIN_S seconds."""


class Quarantine:
    """Corrupt ships and quarantines of pairs; false while nothing is in quarantine.

    A corrupt ship counts for the pair, and for each of its nodes that has corrupt ships with more than one other node.
    `clock` returns monotonic seconds; `on_begin` is called for every quarantine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, on_begin: Callable[[], None] | None = None) -> None:
        self._clock, self._on_begin = clock, on_begin
        self._seen: deque[tuple[float, NodeKey, NodeKey]] = deque(maxlen=1000)
        self._until: dict[Pair, float] = {}

    def __bool__(self) -> bool:
        return bool(self._until)

    def corrupt(self, prefill: NodeKey, decode: NodeKey) -> None:
        """Count a corrupt ship from the first node to the second."""
        now = self._clock()
        self._seen.append((now, prefill, decode))
        recent = [(p, d) for at, p, d in self._seen if now - at <= WITHIN_S]
        sent = [d for p, d in recent if p == prefill]
        received = [p for p, d in recent if d == decode]
        subjects: tuple[tuple[Pair, int, int], ...] = (
            ((prefill, decode), sent.count(decode), CORRUPT_SHIPS),
            ((prefill, None), len(sent), CORRUPT_SHIPS if len(set(sent)) > 1 else len(sent) + 1),
            ((None, decode), len(received), CORRUPT_SHIPS if len(set(received)) > 1 else len(received) + 1),
        )
        for subject, count, most in subjects:
            if count >= most and self._until.get(subject, 0.0) <= now:
                log.warning("%s: %d corrupt or wrong transfers: none is allowed for %g s", subject, count, WITHIN_S)
                self._until[subject] = now + WITHIN_S
                if self._on_begin is not None:
                    self._on_begin()

    def remaining(self) -> dict[Pair, float]:
        """Return the quarantined pairs, with the remaining seconds."""
        now = self._clock()
        return {subject: until - now for subject, until in self._until.items() if until > now}

    def open(self) -> frozenset[Pair]:
        """Return the quarantined pairs."""
        now = self._clock()
        self._until = {subject: until for subject, until in self._until.items() if until > now}
        return frozenset(self._until)
