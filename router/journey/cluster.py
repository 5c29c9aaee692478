"""All nodes as the router sees them, of all models."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from kvferry.model_files.naming import ModelName
from kvferry.process.awake import LoopClock
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.metrics import RouterMetrics
from kvferry.protocol.roles import ChangeRole
from kvferry.protocol.wire import pack
from kvferry.router.journey.budget import RetryBudget
from kvferry.router.journey.chronicle import Chronicle
from kvferry.router.journey.deaths import Deaths
from kvferry.router.journey.errands import Errands
from kvferry.router.journey.model_cluster import ModelCluster, Shared
from kvferry.router.journey.prefixes import BlockLookup, Prefixes
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.group import NodeGroup
from kvferry.router.nodes.table import NodeSource, NodeTable
from kvferry.router.nodes.token_streams import TokenStreams

RETRIES, HEDGES = (0.1, 10.0, 100.0), (0.1, 0.5, 10.0)
"""Of all requests the share that may be tried again and twice at once; how many a second at least, and at most in one
go: a small cluster must get over the loss of a node."""
ROLE_S = 5.0
"""How long a node may take to look whether it may change its role."""
ERRANDS_S = 1.0
"""How long closing waits for cancels still under way."""


class RouterCluster:
    """Joins node table, token streams, index and client. Name what is served with `pool`, then `await open()` in the
    loop that will serve, `await close()` when every journey has ended (or `async with`). Source and index stay the
    caller's to close.

    local_tokens   see RouterSettings.local_prefill_tokens
    buddies        see RouterSettings.buddies
    fetch          see RouterSettings.fetch
    lookup_s       bounds the question to the index
    token          shows the nodes that this router is of their cluster
    patience_s     how long a request waits for a node when none can take it

    nodes, chronicle   what is known of the nodes, and remembered of what went to them
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
        patience_s: float = 15.0,
        nodes: NodeTable | None = None,
        client: NodeClient | None = None,
        token: Callable[[], str] = str,
    ) -> None:
        self.nodes = nodes or NodeTable(source, metrics)
        self.chronicle = Chronicle()
        self._clock = LoopClock()
        self._client = client or NodeClient(f"router-{secrets.token_hex(6)}", token, clock=self._clock.now)
        self._errands = Errands()
        self._streams = TokenStreams(self._client)
        clock = self.nodes.clock
        self._shared = Shared(
            self.nodes,
            self._client,
            Prefixes(index, metrics, lookup_s),
            self._errands,
            metrics,
            local_tokens,
            buddies,
            fetch,
            patience_s,
            Deaths(clock),
            retries=RetryBudget(*RETRIES, clock),
            hedges=RetryBudget(*HEDGES, clock),
            chronicle=self.chronicle,
        )
        self.nodes.listen(self._follow)

    def pool(self, name: ModelName) -> ModelCluster:
        """The nodes of one more served model: those that announce it."""
        return ModelCluster(self.nodes.add(NodeGroup(name)), self._shared)

    @property
    def router_id(self) -> str:
        """By which nodes know this router."""
        return self._client.router_id

    async def change_role(self, node: NodeLease, role: str, rest_s: float) -> None:
        """Ask a node to take a role. Raises what it refuses it with, and NodeLost."""
        await self._client.call(node, "POST /role", pack(ChangeRole(role, rest_s)), ROLE_S, None, None)

    async def open(self) -> None:
        """Read the registry once and begin to follow it; token streams open in the background. Never fails: without
        nodes or registry the cluster is simply not ready."""
        self._clock.start()
        await self.nodes.start()

    async def close(self) -> None:
        await self.nodes.stop()
        await self._errands.finish(ERRANDS_S)
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
