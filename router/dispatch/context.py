"""Dependencies of a request's dispatch: nodes, clients, metrics and logs of one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvferry.placement.types import Demand, NodeKey, Placement
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import Job
from kvferry.protocol.metrics import RouterMetrics
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.router.dispatch.attempt import Attempt
from kvferry.router.dispatch.events import Event
from kvferry.router.dispatch.pending_requests import PendingRequests
from kvferry.router.dispatch.poison_requests import PoisonRequests
from kvferry.router.dispatch.retry_budget import RetryBudget
from kvferry.router.nodes.model_nodes import ModelNodes
from kvferry.router.request_log import RequestLog


class DispatchContext(Protocol):
    """The nodes of a model and what is known of them.

    patience_s: how long a request waits for a node when none can take it. held: those that do. retries, hedges: what
    may be tried again of requests without a token, and tried twice at once. request log: what is remembered for those
    who watch."""

    group: ModelNodes
    metrics: RouterMetrics
    router_id: str
    patience_s: float
    held: PendingRequests
    deaths: PoisonRequests
    retries: RetryBudget
    hedges: RetryBudget
    request_log: RequestLog

    async def reuse(self, hashes: Sequence[bytes], held: Mapping[NodeKey, int]) -> dict[str, int]:
        """Leading blocks held, by node id, at least those that are known to be `held`; no others when that cannot be
        known in time."""

    def remember(self, hashes: Sequence[bytes], nodes: Sequence[NodeLease]) -> None:
        """These nodes have the blocks of an attempt's prompt."""

    def place(self, demand: Demand, held: Mapping[str, int]) -> Placement:
        """Place the next attempt, given the result of `reuse`.

        Raises NoNodes, Overloaded or ContextLengthExceeded."""

    def launch(
        self,
        job: Job,
        placement: Placement,
        post: Callable[[Event], None],
        forerunner: Attempt | None = None,
        hashes: Sequence[bytes] = (),
    ) -> Attempt:
        """Book the placement and begin; nothing may be awaited since `place`.

        A MigrationAttempt where there is a forerunner, whose node drains. hashes: of the full blocks that are to be
        computed, if they are known."""

    def doubt(self, late: Placement) -> None:
        """An attempt placed so has no first token when it should have."""

    def able(self, role: str, besides: NodeKey | None = None, adapter: str = "") -> set[NodeKey]:
        """Nodes that could take an attempt with the adapter of that id; `besides` even if a connection to it failed."""

    def account(self, told: Reuse | None, job: Job, node: NodeLease | None) -> Reuse:
        """Return the origin of the prompt's tokens as the node reported it, if that adds up."""

    def record(self, last: Placement, predicted: int, missed: Mapping[str, int], reuse: Reuse, waited_s: float) -> None:
        """The first token came, from an attempt placed as `last`, `waited_s` after its launch."""
