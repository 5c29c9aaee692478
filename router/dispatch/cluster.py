"""All models' nodes as the router sees them."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from kvferry.model_files.model_name import ModelName
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.metrics import RouterMetrics
from kvferry.protocol.roles import ChangeRole
from kvferry.protocol.wire import pack
from kvferry.router.dispatch.background_calls import BackgroundCalls
from kvferry.router.dispatch.model_cluster import ModelCluster, Shared
from kvferry.router.dispatch.poison_requests import PoisonRequests
from kvferry.router.dispatch.prefixes import BlockLookup, Prefixes
from kvferry.router.dispatch.retry_budget import RetryBudget
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.model_nodes import ModelNodes
from kvferry.router.nodes.node_table import NodeSource, NodeTable
from kvferry.router.nodes.token_streams import TokenStreams
from kvferry.router.request_log import RequestLog
from kvferry.runtime.suspend_aware_clock import LoopClock

RETRIES, HEDGES = (0.1, 10.0, 100.0), (0.1, 0.5, 10.0)
"""Of all requests the share that may be tried again and twice at once; how many a second at least, and at most in one
go: a small cluster must get over the loss of a node."""
ROLE_S = 5.0
"""How long a node may take to look whether it may change its role."""
BACKGROUND_CALLS_S = 1.0
"""How long closing waits for cancels still under way."""


class RouterCluster:
    """Joins node table, token streams, index and client.

    Name what is served with `pool`, then `await open()` in the loop that will serve, `await close()` when every
    dispatch has ended (or `async with`). Source and index stay the caller's to close.

    local_tokens   see RouterSettings.local_prefill_tokens
    buddies        see RouterSettings.buddies
    fetch          see RouterSettings.fetch
    lookup_s       bounds the question to the index
    token          shows the nodes that this router is of their cluster
    patience_s     how long a request waits for a node when none can take it

    nodes, request_log what is known of the nodes, and remembered of what went to them"""

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
        patience_s: float = 15.0,
        nodes: NodeTable | None = None,
        client: NodeClient | None = None,
        token: Callable[[], str] = str,
    ) -> None:
        self.nodes = nodes or NodeTable(source, metrics)
        self.request_log = RequestLog()
        self._clock = LoopClock()
        self._client = client or NodeClient(f"router-{secrets.token_hex(6)}", token, clock=self._clock.now)
        self._background_calls = BackgroundCalls()
        self._streams = TokenStreams(self._client)
        clock = self.nodes.clock
        self._shared = Shared(
            self.nodes,
            self._client,
            Prefixes(index, metrics, lookup_s),
            self._background_calls,
            metrics,
            local_tokens,
            buddies,
            fetch,
            patience_s,
            PoisonRequests(clock),
            retries=RetryBudget(*RETRIES, clock),
            hedges=RetryBudget(*HEDGES, clock),
            request_log=self.request_log,
        )
        self.nodes.listen(self._follow)

    def pool(self, name: ModelName) -> ModelCluster:
        """The nodes of one more served model: those that announce it."""
        return ModelCluster(self.nodes.add(ModelNodes(name)), self._shared)

    @property
    def router_id(self) -> str:
        """Return the id by which nodes know this router."""
        return self._client.router_id

    async def change_role(self, node: NodeLease, role: str, rest_s: float) -> None:
        """Ask a node to take a role. Raises what it refuses it with, and NodeLost."""
        await self._client.call(node, "POST /role", pack(ChangeRole(role, rest_s)), ROLE_S, None, None)

    async def open(self) -> None:
        """Read the registry once and begin to follow it; token streams open in the background.

        Never fails: without nodes or registry the cluster is simply not ready."""
        self._clock.start()
        await self.nodes.start()

    async def close(self) -> None:
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
        """The nodes changed: hold a stream to each."""
        self._streams.keep(self.nodes.entries.values())
