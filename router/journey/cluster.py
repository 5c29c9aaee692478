"""All nodes as the router sees them, of all models."""

from __future__ import annotations

import secrets

from model_files.naming import ModelName
from protocol.metrics import RouterMetrics
from router.journey.attempt import Errands
from router.journey.model_cluster import BlockIndex, BlockLookup, ModelCluster, Shared
from router.nodes.client import NodeClient
from router.nodes.group import NodeGroup
from router.nodes.table import NodeSource, NodeTable
from router.nodes.token_streams import TokenStreams

ERRANDS_S = 1.0
"""How long closing waits for cancels still under way."""


class RouterCluster:
    """Joins node table, token streams, index and client. Name what is served with `pool`, then `await open()` in the
    loop that will serve, `await close()` when every journey has ended (or `async with`). Source and index stay the
    caller's to close.

    local_tokens   see RouterSettings.local_prefill_tokens
    lookup_s       bounds the question to the index
    patience_s     how long a request that already began waits for a node when none can take it
    """

    def __init__(
        self,
        source: NodeSource,
        index: BlockLookup,
        metrics: RouterMetrics,
        *,
        local_tokens: int = 0,
        lookup_s: float = 0.1,
        patience_s: float = 15.0,
        nodes: NodeTable | None = None,
        client: NodeClient | None = None,
    ) -> None:
        self._nodes = nodes or NodeTable(source, metrics)
        self._client = client or NodeClient(f"router-{secrets.token_hex(6)}")
        self._errands = Errands()
        self._streams = TokenStreams(self._client)
        asked = BlockIndex(index, metrics, lookup_s)
        self._shared = Shared(self._nodes, self._client, asked, self._errands, metrics, local_tokens, patience_s)
        self._nodes.listen(self._follow)

    def pool(self, name: ModelName) -> ModelCluster:
        """The nodes of one more served model: those that announce it."""
        return ModelCluster(self._nodes.add(NodeGroup(name)), self._shared)

    async def open(self) -> None:
        """Read the registry once and begin to follow it; token streams open in the background. Never fails: without
        nodes or registry the cluster is simply not ready."""
        await self._nodes.start()

    async def close(self) -> None:
        await self._nodes.stop()
        await self._errands.finish(ERRANDS_S)
        await self._streams.close()
        await self._client.aclose()

    async def __aenter__(self) -> RouterCluster:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _follow(self) -> None:
        """The nodes changed: hold a stream to every decode node."""
        self._streams.keep(entry for entry in self._nodes.entries.values() if entry.lease.role == "decode")
