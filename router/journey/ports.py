"""What a journey acts on; `router.journey.model_cluster` has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from placement.terms import Demand, NodeKey, Placement
from protocol.lease import NodeLease
from protocol.messages import Job, Reuse
from protocol.metrics import RouterMetrics
from router.journey.attempt import Attempt, Event
from router.nodes.group import NodeGroup


class Ground(Protocol):
    """The nodes of a model and what is known of them. `patience_s`: how long a request that already began waits for a
    node when none can take it."""

    group: NodeGroup
    metrics: RouterMetrics
    router_id: str
    patience_s: float

    async def reuse(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Leading blocks held, by node id; nothing when that cannot be known in time."""

    def place(self, demand: Demand, held: Mapping[str, int]) -> Placement:
        """Where the next attempt goes, given what `reuse` answered. Raises NoNodes, Overloaded or
        ContextLengthExceeded."""

    def launch(self, job: Job, placement: Placement, post: Callable[[Event], None]) -> Attempt:
        """Book the placement and begin; nothing may be awaited since `place`."""

    def able(self, role: str, besides: NodeKey | None = None, adapter: str = "") -> set[NodeKey]:
        """Nodes that could take an attempt with the adapter of that id; `besides` even if a connection to it failed."""

    def account(self, told: Reuse | None, job: Job, node: NodeLease | None) -> Reuse:
        """Where the prompt's tokens came from, as the node told it if that adds up."""

    def record(self, first: Placement, last: Placement, reuse: Reuse, waited_s: float) -> None:
        """The first token came, from an attempt placed as `last`, `waited_s` after its launch."""
