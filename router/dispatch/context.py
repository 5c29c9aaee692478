"""DispatchContext: interface of the services that a model's cluster provides to its dispatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvferry.placement.types import Demand, NodeKey, Placement
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import Job
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.dispatch.attempt import Attempt
from kvferry.router.dispatch.canary_release import CanaryRelease
from kvferry.router.dispatch.displacement import Displacement
from kvferry.router.dispatch.events import Event
from kvferry.router.dispatch.pending_requests import PendingRequests
from kvferry.router.dispatch.poison_requests import PoisonRequests
from kvferry.router.dispatch.retry_budget import RetryBudget
from kvferry.router.dispatch.timers import Spacing
from kvferry.router.nodes.model_nodes import FingerprintGroup, ModelNodes
from kvferry.router.nodes.session_notes import SessionNoter
from kvferry.router.request_log import RequestLog

Hashes = Mapping[str, Sequence[bytes]]
"""Hashes of a prompt's full blocks, by fingerprint of the nodes that use them."""
Hits = Mapping[str, Mapping[str, int]]
"""Leading blocks of a prompt that nodes hold, by fingerprint, then by node id or other index name."""


class DispatchContext(Protocol):
    """Services that one model's cluster provides to its dispatches.

    max_wait_s    how long a request waits when no node can take it, in seconds
    held          requests that wait for a node
    deaths        poison-request detection
    retries       budget for retries of requests without a first token
    hedges        budget for hedged attempts
    looks         times at which requests look again for other nodes
    request_log   recent requests and events for the dashboard
    displacement  requests with targets, and patient ones that they preempt
    session_notes  notes about sessions for nodes
    canary        choice of the groups that a new request goes to; None: any
    """

    model: ModelNodes
    metrics: RouterMetrics
    router_id: str
    max_wait_s: float
    held: PendingRequests
    deaths: PoisonRequests
    retries: RetryBudget
    hedges: RetryBudget
    looks: Spacing
    request_log: RequestLog
    displacement: Displacement
    session_notes: SessionNoter
    canary: CanaryRelease | None

    async def reuse(self, hashes: Hashes, held: Mapping[NodeKey, int]) -> Hits:
        """Return the leading blocks that nodes hold; at least those in `held`.

        If the index does not answer in time, the result holds no other nodes."""

    def remember(self, hashes: Sequence[bytes], nodes: Sequence[NodeLease]) -> None:
        """Record that these nodes hold the blocks of an attempt's prompt."""

    def place(self, demand: Demand, held: Hits, groups: Sequence[FingerprintGroup] | None = None) -> Placement:
        """Place the next attempt in one of these groups, by default any, given the result of `reuse`.

        Raises NoNodes, Overloaded or ContextLengthExceeded."""

    def launch(
        self,
        job: Job,
        placement: Placement,
        post: Callable[[Event], None],
        predecessor: Attempt | None = None,
        hashes: Sequence[bytes] = (),
    ) -> Attempt:
        """Reserve the placement and start the attempt; the caller must not await between `place` and this call.

        Returns a MigrationAttempt if `predecessor` is given, the attempt whose node drains. `hashes` are those of the
        full blocks that will be computed, if known."""

    def suspect(self, late: Placement, *, ships: bool = False) -> None:
        """Suspect the nodes of a late attempt; ships: its first token has arrived, but its blocks have not."""

    def usable(self, role: str, also: NodeKey | None = None, adapter: str = "", fingerprint: str = "") -> set[NodeKey]:
        """Return the nodes that could take an attempt with this adapter id, including `also` despite its failure.

        fingerprint: the one they must have; empty: any."""

    def account(self, reported: Reuse | None, job: Job, node: NodeLease | None) -> Reuse:
        """Return the node's account of the prompt's tokens if it adds up, else one without reuse."""

    def record(self, last: Placement, predicted: int, missed: Mapping[str, int], reuse: Reuse, waited_s: float) -> None:
        """Record the first token of an attempt placed as `last`, `waited_s` seconds after its launch."""
