"""PoisonRequests: detects requests that crash nodes, as suspects that ran on several nodes when these died.

A suspect is cleared when it has produced some tokens beyond the position of the death. Suspects avoid each other while
that costs little; a suspect of two deaths avoids all others. The second death at the same phase, or the third at any,
convicts a suspect that was alone on the node. A request that breaks nodes breaks them at the same phase; one that lost
a node in prefill and another in decode was more likely there by chance. Other requests of a dead node continue."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kvferry.placement.types import NodeKey
from kvferry.protocol.errors import FatalRequest
from kvferry.router.dispatch.failures import Work

CLEARED_TOKENS = 4
"""Tokens beyond the position of a node's death that clear a request.

Several are needed because tokens may have been computed and lost with the process."""
MAX_PHASE_DEATHS = 2
"""Number of node deaths in one phase that convict a request; as a total it bars sharing a node with suspects."""
MAX_LOSSES = 3
"""Total number of node deaths that convict a request."""
SHARING_COST_S = 0.5
"""Placement cost of sharing a node with a suspect, in seconds."""
MEMORY_S = 10.0
"""Time a death's set of suspects is kept, in seconds; all its requests learn of the death within it."""


@dataclass(slots=True, eq=False)
class Suspect:
    """Record of one request's node deaths.

    losses     nodes that died under it since its last progress
    works      number of deaths by the phase it was in
    delivered  its output tokens at the last death
    nodes      the nodes that it runs on now
    """

    losses: int = 0
    works: dict[Work, int] = field(default_factory=dict)
    delivered: int = 0
    nodes: frozenset[NodeKey] = frozenset()

    def cleared_by(self, delivered: int) -> bool:
        """Return whether `delivered` output tokens clear the request."""
        return self.losses > 0 and delivered >= self.delivered + CLEARED_TOKENS

    @property
    def is_poison(self) -> bool:
        """Return whether the request is convicted if it was alone with its last death."""
        return self.losses >= MAX_LOSSES or max(self.works.values(), default=0) >= MAX_PHASE_DEATHS


class PoisonRequests:
    """Suspects of all dispatches; `any` is true while there are suspects on any node."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.any = False
        self._clock = clock
        self._running: defaultdict[NodeKey, set[Suspect]] = defaultdict(set)
        self._deaths: dict[NodeKey, tuple[float, frozenset[Suspect]]] = {}

    def move(self, suspect: Suspect, nodes: Iterable[NodeKey]) -> None:
        """Record that the suspect runs on exactly these nodes."""
        for node in suspect.nodes:
            self._running[node].discard(suspect)
            if not self._running[node]:
                del self._running[node]
        suspect.nodes = frozenset(nodes if suspect.losses else ())
        for node in suspect.nodes:
            self._running[node].add(suspect)
        self.any = bool(self._running)

    def clear(self, suspect: Suspect) -> None:
        """Clear the suspect after progress or its end."""
        suspect.losses = 0
        suspect.works.clear()
        self.move(suspect, ())

    def died(self, node: NodeKey, works: Collection[Work], suspect: Suspect, delivered: int) -> None:
        """Record that a node's process died while the request was in these phases, with `delivered` output tokens.

        Raises FatalRequest if only this request can have killed it."""
        there = self._suspects(node)
        suspect.losses += 1
        for work in works:
            suspect.works[work] = suspect.works.get(work, 0) + 1
        suspect.delivered = delivered
        if suspect.is_poison and not there - {suspect}:
            raise FatalRequest(f"{suspect.losses} nodes ended while they worked on this request; it is not retried")

    def sharing_costs(self, suspect: Suspect) -> Mapping[NodeKey, float]:
        """Return the placement cost, in seconds, of each node where other suspects run."""
        others = {node: len(there - {suspect}) for node, there in self._running.items()}
        return {node: SHARING_COST_S * count for node, count in others.items() if count}

    def forbidden_nodes(self, suspect: Suspect) -> set[NodeKey]:
        """Return the nodes on which the request may not run."""
        if not suspect.losses:
            return set()
        worst = suspect.losses >= MAX_PHASE_DEATHS
        return {
            node
            for node, there in self._running.items()
            if any(worst or other.losses >= MAX_PHASE_DEATHS for other in there if other is not suspect)
        }

    def _suspects(self, node: NodeKey) -> frozenset[Suspect]:
        """Return the suspects on a node at its death, fixed at the first report; requests learn of it one by one."""
        now = self._clock()
        for other in [key for key, (at, _) in self._deaths.items() if now - at > MEMORY_S]:
            del self._deaths[other]
        if node not in self._deaths:
            self._deaths[node] = (now, frozenset(self._running.get(node, ())))
        return self._deaths[node][1]
