"""What a journey acts on: the nodes, their token streams, the block index, and the counters of placement."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from placement.costs import Demand, NodeKey, NodeView
from placement.place import Placement, place
from protocol.messages import NodeLease, Reuse
from protocol.metrics import RouterMetrics
from router.journey.attempt import Errands
from router.nodes.client import NodeClient
from router.nodes.table import NodeTable, node_key
from router.nodes.token_streams import TokenStreams

log = logging.getLogger(__name__)


class BlockLookup(Protocol):
    """The block index, as far as the router needs it."""

    async def longest_prefix(self, hashes: Sequence[bytes], nodes: Mapping[str, int]) -> dict[str, int]:
        """Leading blocks held, by node id, for nodes given with their live epoch."""


@dataclass(slots=True)
class Fleet:
    """Shared by all journeys of one router. `lookup_s` bounds the question to the index, `patience_s` how long a
    request that already began waits for a node when none can take it."""

    router_id: str
    nodes: NodeTable
    streams: TokenStreams
    client: NodeClient
    index: BlockLookup
    metrics: RouterMetrics
    errands: Errands
    local_tokens: int = 0
    lookup_s: float = 0.1
    patience_s: float = 15.0
    _turn: int = 0

    async def reuse(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Leading blocks held, by node id; nothing when the index does not answer in time (load-only placement)."""
        nodes = {lease.node_id: lease.epoch for lease in self.nodes.group()}
        if not hashes or not nodes or not self.nodes.up:
            return {}
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self.lookup_s):
                return await self.index.longest_prefix(hashes, nodes)
        except Exception as error:
            log.warning("block index does not answer, placing by load alone: %r", error)
            return {}
        finally:
            self.metrics.index_seconds.observe(time.perf_counter() - began)

    def place(self, demand: Demand, reuse_blocks: Mapping[str, int]) -> Placement:
        """Raises NoNodes, Overloaded or ContextLengthExceeded. Nothing is booked yet."""
        self._turn += 1
        demand = replace(demand, local_tokens=self.local_tokens)
        views = [view for view in self.nodes.views(reuse_blocks) if view.key == demand.pinned or self._reachable(view)]
        return place(demand, views, self._turn)

    def prefills(self, besides: NodeKey | None = None) -> set[NodeKey]:
        """Prefill nodes that could take an attempt; `besides`, if ready, even though a connection to it failed."""
        leases = [lease for lease in self.nodes.group() if lease.role == "prefill" and lease.state == "ready"]
        keys = {node_key(lease) for lease in leases}
        return {key for key in keys if key == besides or not self.nodes.suspected(key)}

    def decodes(self) -> list[NodeLease]:
        """Decode nodes that could take an attempt: ready and their stream open."""
        leases = [lease for lease in self.nodes.group() if lease.role == "decode" and lease.state == "ready"]
        return [lease for lease in leases if self.streams.is_open(node_key(lease))]

    def record(self, first: Placement, last: Placement, reuse: Reuse, waited_s: float) -> None:
        """The first token came: compare what the placements promised with what happened. `first` is the placement of
        the request's first attempt, `last` that of the attempt which delivered, `waited_s` since its launch."""
        moved = max(0, first.cached_len - last.cached_len)
        evicted = max(0, min(first.cached_len, last.cached_len) - reuse.cached_len)
        self.metrics.predicted_reuse.inc(first.cached_len)
        self.metrics.actual_reuse.inc(reuse.cached_len)
        if moved:
            self.metrics.reuse_misses.labels("failover").inc(moved)
        if evicted:
            self.metrics.reuse_misses.labels("evicted").inc(evicted)
        self.metrics.placement_regret.inc(max(0.0, waited_s - last.first_token_s))
        log.debug(
            "%s: first token after %.4f s (expected %.4f), reused %d tokens (expected %d)",
            last.kind, waited_s, last.first_token_s, reuse.cached_len, first.cached_len,
        )  # fmt: skip

    def _reachable(self, view: NodeView) -> bool:
        if view.lease.role == "decode":
            return self.streams.is_open(view.key)
        return not self.nodes.suspected(view.key)
