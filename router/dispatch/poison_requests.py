"""Poison-request detection: requests that were on a node when its process died are suspects.

A request that was there once is a suspect, until it gets on: until some tokens have come from behind the place where
it was. Suspects are kept apart as far as that costs little. One that was there twice is kept from all others. Anyone
who is alone with its second death at the same work, or its third at any, is to blame; the others are innocent and go
on: what breaks a node breaks the next at the same work, and who lost one to its prompt and another while it decoded was
more likely there by chance, twice.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kvferry.placement.types import NodeKey
from kvferry.protocol.errors import FatalRequest
from kvferry.router.dispatch.failures import Work

CLEARED_TOKENS = 4
"""A request that got so far behind the place where its node died did not kill it. Fewer may have been made, and lost
with the process."""
MOST_ALIKE = 2
"""Nodes that a request may lose at one work, and how many losses part it from all others."""
MOST_LOSSES = 3
"""Nodes that a request may lose."""
DOUBT_S = 0.5
"""What it is worth not to share a node with a suspect."""
MEMORY_S = 10.0
"""So long all that was on a node hears of one death."""


@dataclass(slots=True, eq=False)
class Suspect:
    """A request, as far as deaths go.

    losses: nodes that died under it since it last got on; works: how many had each work to do for it; delivered: its
    output tokens when the last one died; nodes: those where it is now."""

    losses: int = 0
    works: Counter[Work] = field(default_factory=Counter)
    delivered: int = 0
    nodes: set[NodeKey] = field(default_factory=set)

    def cleared_by(self, delivered: int) -> bool:
        return self.losses > 0 and delivered >= self.delivered + CLEARED_TOKENS

    @property
    def damned(self) -> bool:
        """Once it is alone with its last loss."""
        return self.losses >= MOST_LOSSES or max(self.works.values(), default=0) >= MOST_ALIKE


class PoisonRequests:
    """Shared by all dispatches. `any`: whether there are suspects anywhere."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.any = False
        self._clock = clock
        self._there: defaultdict[NodeKey, set[Suspect]] = defaultdict(set)
        self._died: dict[NodeKey, tuple[float, frozenset[Suspect]]] = {}

    def move(self, suspect: Suspect, nodes: Iterable[NodeKey]) -> None:
        """It is there now, and nowhere else."""
        for node in suspect.nodes:
            self._there[node].discard(suspect)
            if not self._there[node]:
                del self._there[node]
        suspect.nodes = set(nodes) if suspect.losses else set()
        for node in suspect.nodes:
            self._there[node].add(suspect)
        self.any = bool(self._there)

    def clear(self, suspect: Suspect) -> None:
        """It got on, or ended."""
        suspect.losses = 0
        suspect.works.clear()
        self.move(suspect, ())

    def died(self, node: NodeKey, works: Collection[Work], suspect: Suspect, delivered: int) -> None:
        """The process died while the request was there, for these works, with so many of its tokens delivered.

        Raises FatalRequest if none but the request can have killed it."""
        there = self._suspects(node)
        suspect.losses += 1
        suspect.works.update(works)
        suspect.delivered = delivered
        if suspect.damned and not there - {suspect}:
            raise FatalRequest(f"{suspect.losses} nodes ended while they worked on this request; it is not tried again")

    def doubts(self, suspect: Suspect) -> Mapping[NodeKey, float]:
        """In seconds, of nodes where others are that may kill them."""
        others = {node: len(there - {suspect}) for node, there in self._there.items()}
        return {node: DOUBT_S * count for node, count in others.items() if count}

    def barred(self, suspect: Suspect) -> set[NodeKey]:
        """Return the nodes on which it may not run."""
        if not suspect.losses:
            return set()
        worst = suspect.losses >= MOST_ALIKE
        return {
            node
            for node, there in self._there.items()
            if any(worst or other.losses >= MOST_ALIKE for other in there if other is not suspect)
        }

    def _suspects(self, node: NodeKey) -> frozenset[Suspect]:
        """Those on the node as it died: requests hear of it one by one, and go elsewhere."""
        now = self._clock()
        for other in [key for key, (at, _) in self._died.items() if now - at > MEMORY_S]:
            del self._died[other]
        if node not in self._died:
            self._died[node] = (now, frozenset(self._there.get(node, ())))
        return self._died[node][1]
