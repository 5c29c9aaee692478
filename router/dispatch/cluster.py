"""RouterCluster: the router's nodes of all models, with the table, client and token streams they share."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Protocol

from kvferry.model_files.model_name import ModelName
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.roles import ChangeRole
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.wire import pack
from kvferry.router.dispatch.background_calls import BackgroundCalls
from kvferry.router.dispatch.canary_release import CanaryRelease
from kvferry.router.dispatch.model_cluster import ModelCluster
from kvferry.router.dispatch.poison_requests import PoisonRequests
from kvferry.router.dispatch.prefixes import BlockLookup, Prefixes
from kvferry.router.dispatch.retry_budget import RetryBudget
from kvferry.router.dispatch.router_services import RouterServices
from kvferry.router.dispatch.timers import Spacing
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.model_nodes import ModelNodes
from kvferry.router.nodes.node_source import LastNodes, NodeSource
from kvferry.router.nodes.node_table import NodeTable
from kvferry.router.nodes.relayed_journals import RelayedJournalScripts
from kvferry.router.nodes.relayed_registry import RelayedRegistry, SealedLeases
from kvferry.router.nodes.session_notes import SessionNoter
from kvferry.router.nodes.token_streams import TokenStreams
from kvferry.router.request_log import RequestLog
from kvferry.runtime.suspend_aware_clock import LoopClock
from kvferry.runtime.tls import PLAIN, WorkerTls

RETRIES, HEDGES = (0.1, 10.0, 100.0), (0.1, 0.5, 10.0)
"""Budgets for retries and hedges: share of all requests, minimum per second, and maximum burst.

The minimum lets a small cluster recover from the loss of a node."""
LOOKS_APART_S = 0.002
"""Seconds between two requests' looks for other nodes while theirs may hang; each look costs a placement, 0.2 ms."""
ROLE_S = 5.0
"""Longest time a node may take to answer a role change, in seconds."""
BACKGROUND_CALLS_S = 1.0
"""Longest time `close` waits for running cancels, in seconds."""


class Store(NodeSource, BlockLookup, Protocol):
    """Parts of the node registry and the block index that a router uses."""

    @property
    def records(self) -> SealedLeases:
        """Return the reader of leases that nodes relay."""


class RouterCluster:
    """Nodes of all served models, with the services that their clusters share.

    Declare each served model with `pool`, then `await open()` in the loop that will serve, and `await close()` after
    every dispatch has ended (or use `async with`). The caller closes source and index.

    local_tokens        see RouterSettings.local_prefill_tokens
    buddies             see RouterSettings.buddies
    fetch               see RouterSettings.fetch
    lookup_s            limit of one index lookup, in seconds
    token               returns the secret that authenticates this router to the nodes
    tls                 of connections to the nodes
    max_wait_s          how long a request waits when no node can take it, in seconds
    canary              share of new requests for the nodes of one engine; None: nodes share by cost
    last                last known nodes, for a start without the registry; None: are not kept
    relayed             reads leases that nodes relay while the registry does not answer; None: nodes are not asked

    nodes, request_log  live nodes, and recent events for the dashboard
    journal_relay       scripts of the journals, run through nodes
    """

    def __init__(
        self,
        source: NodeSource,
        index: BlockLookup,
        metrics: RouterMetrics,
        *,
        local_tokens: int = 0,
        buddies: bool = True,
        fetch: bool = True,
        lookup_s: float = 0.1,
        max_wait_s: float = 15.0,
        canary: CanaryRelease | None = None,
        nodes: NodeTable | None = None,
        client: NodeClient | None = None,
        token: Callable[[], str] = str,
        tls: WorkerTls = PLAIN,
        last: LastNodes | None = None,
        relayed: SealedLeases | None = None,
    ) -> None:
        self.nodes = nodes or NodeTable(source, metrics, last=last)
        self.request_log = RequestLog()
        self._clock = LoopClock()
        self._client = client or NodeClient(f"router-{secrets.token_hex(6)}", token, tls, clock=self._clock.now)
        self._background_calls = BackgroundCalls()
        self._streams = TokenStreams(self._client)
        self._relayed = RelayedRegistry(self.nodes, self._client, relayed) if relayed is not None else None
        self.journal_relay = RelayedJournalScripts(self.nodes, self._client)
        clock = self.nodes.clock
        self._shared = RouterServices(
            self.nodes,
            self._client,
            Prefixes(index, metrics, lookup_s),
            self._background_calls,
            metrics,
            local_tokens,
            buddies,
            fetch,
            max_wait_s,
            PoisonRequests(clock),
            retries=RetryBudget(*RETRIES, clock),
            hedges=RetryBudget(*HEDGES, clock),
            looks=Spacing(LOOKS_APART_S),
            request_log=self.request_log,
            session_notes=SessionNoter(self._client, self._background_calls),
            canary=canary,
        )
        self.nodes.listen(self._follow)

    def pool(self, name: ModelName) -> ModelCluster:
        """Add a served model and return its cluster: the nodes that announce the name."""
        return ModelCluster(self.nodes.add(ModelNodes(name)), self._shared)

    @property
    def router_id(self) -> str:
        """Return the id by which nodes know this router."""
        return self._client.router_id

    async def change_role(self, node: NodeLease, role: str, rest_s: float) -> None:
        """Ask a node to take a role; raise NodeLost, or the error with which the node refuses."""
        await self._client.call(node, "POST /role", pack(ChangeRole(role, rest_s)), ROLE_S, None, None)

    async def open(self) -> None:
        """Read the registry once and start following it; token streams open in the background.

        Never fails: without nodes or registry the cluster is not ready."""
        self._clock.start()
        await self.nodes.start()
        if self._relayed is not None:
            self._relayed.start()

    async def close(self) -> None:
        """Stop following the registry, finish running cancels, and close all connections."""
        if self._relayed is not None:
            await self._relayed.stop()
        await self.nodes.stop()
        await self._background_calls.finish(BACKGROUND_CALLS_S)
        await self._streams.close()
        await self._client.aclose()
        self._clock.stop()

    async def __aenter__(self) -> RouterCluster:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _follow(self) -> None:
        """Keep one token stream to each node after the nodes changed."""
        self._streams.keep(self.nodes.entries.values())
