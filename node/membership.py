"""A node's place in the cluster, as Redis holds it: its lease, and its rows of the block index."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from cluster_state.index import IndexWriter
from cluster_state.redis_store import RedisStore
from cluster_state.registry import LeaseKeeper
from protocol.lease import NodeLease
from protocol.metrics import WorkerMetrics

LEAVE_S = 1.0
"""What each last word to Redis may take: a Redis that hangs must not keep a node from ending."""


class Membership:
    """Kept up from `join` to `leave`. Redis may come and go; nothing here raises.

    make_lease   the node's row in the registry, as of now
    findable     hashes of all blocks that can be reused here, parents before children
    """

    def __init__(
        self,
        store: RedisStore,
        make_lease: Callable[[], NodeLease],
        findable: Callable[[], Iterable[bytes]],
        metrics: WorkerMetrics,
    ) -> None:
        self._store, self._metrics = store, metrics
        named = make_lease()
        self._writer = IndexWriter(store, named.node_id, named.epoch, findable)
        self._keeper = LeaseKeeper(
            store, make_lease, on_restored=self._writer.republish, on_outcome=self._count_renewal
        )
        self.note = self._writer.note

    @property
    def held(self) -> bool:
        """Whether the registry has the node's lease, as far as can be known."""
        return self._keeper.held

    async def join(self) -> None:
        """Begin to announce the node and its blocks; returns once the registry has its lease."""
        await self._writer.start()
        self._keeper.start()
        await self._keeper.first_held()

    async def announce(self) -> None:
        """The node's state changed: tell it now."""
        await _within(LEAVE_S, self._keeper.announce_now())

    async def leave(self, limit_s: float = LEAVE_S) -> None:
        """Withdraw the lease; rows end with it."""
        await _within(limit_s, self._keeper.stop(), self._writer.stop())

    async def close(self) -> None:
        """Close the connections to Redis."""
        await _within(LEAVE_S, self._store.close())

    def set_gauges(self) -> None:
        self._metrics.index_rows.set(self._writer.rows)
        self._metrics.index_pending.set(self._writer.pending)

    def _count_renewal(self, outcome: str) -> None:
        self._metrics.lease_renewals[outcome].inc()


async def _within(seconds: float, *calls: Coroutine[Any, Any, Any]) -> None:
    """Run the calls at once and give up those that take longer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*calls)
