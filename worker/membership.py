"""Membership of a node in the cluster: keeps its lease and its rows of the block index in Redis, from join to leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from kvferry.cluster_state.index import on_tier
from kvferry.cluster_state.index_writer import IndexWriter
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.cluster_state.registry import LeaseKeeper
from kvferry.cluster_state.store_rows import StoreRows
from kvferry.protocol.errors import RegistryUnavailable
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.worker_metrics import WorkerMetrics

log = logging.getLogger("kvferry.worker")

REPLACEMENT_CHECK_S = 0.5
"""Seconds between two checks for a node that can replace this one, the last of its role."""
WITHDRAW_S = 0.5
"""Maximum time to withdraw the lease after a thread ended or hangs, in seconds; the process must restart soon."""
REDIS_CALL_S = 1.0
"""Maximum time of any other call to Redis, in seconds, so that a Redis that hangs does not block the exit."""


class TierRows(Protocol):
    """Set of blocks in a tier, by their rows of the block index.

    changed: called with (stored, removed) rows, from any thread."""

    changed: Callable[[Sequence[bytes], Sequence[bytes]], None]

    def rows(self) -> list[bytes]:
        """Return the rows of all blocks in the tier."""
        ...


class OwnTier(TierRows, Protocol):
    """Tier that belongs to this node, with its own name in the block index."""

    @property
    def name(self) -> str:
        """Return the tier's name."""
        ...


class Membership:
    """Membership of the node in the cluster, from `join` to `leave`.

    It renews the lease and publishes the node's blocks. Nothing here raises: Redis may be unavailable at any time.

    make_lease   returns the node's current lease
    findable     rows of all reusable blocks in the pool, parents before children
    kept         the node's own tiers; their `changed` is set to publish changes
    shared       the node's record of blocks in the shared store; None: no shared store
    note         records changes of the pool as (stored, removed) rows; from any thread"""

    def __init__(
        self,
        store: RedisStore,
        make_lease: Callable[[], NodeLease],
        findable: Callable[[], Iterable[bytes]],
        metrics: WorkerMetrics,
        kept: Sequence[OwnTier] = (),
        shared: TierRows | None = None,
    ) -> None:
        self._store, self._metrics, self._make_lease = store, metrics, make_lease
        self._leaving = False
        named = make_lease()
        of_pool = IndexWriter(store, named.node_id, named.epoch, findable)
        self._writers = [of_pool]
        for tier in kept:
            writer = IndexWriter(store, on_tier(named.node_id, tier.name), named.epoch, tier.rows)
            self._writers.append(writer)
            tier.changed = writer.note
        self._store_rows: StoreRows | None = None
        if shared is not None:
            self._store_rows = StoreRows(store, shared.rows)
            shared.changed = self._store_rows.note
        self._keeper = LeaseKeeper(store, self._lease, on_restored=self._restored, on_outcome=self._count_renewal)
        self.note = of_pool.note

    @property
    def held(self) -> bool:
        """Return whether the registry holds the node's lease, as far as the node knows."""
        return self._keeper.held

    @property
    def trouble(self) -> str:
        """Return why the registry lacks the node's lease; empty if it has it."""
        return self._keeper.trouble

    async def join(self) -> None:
        """Start to publish the lease and blocks; returns once the registry holds the lease."""
        for writer in self._all():
            await writer.start()
        self._keeper.start()
        await self._keeper.first_held()

    async def announce(self) -> bool:
        """Write the changed lease to the registry now; return whether the registry accepted it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REDIS_CALL_S):
                return await self._keeper.announce_now()
        return False

    async def wait_for_replacement(self, may_wait: Callable[[], bool]) -> None:
        """Return once another ready node of the same role and model can take over, or `may_wait` returns false.

        The lease announces that this node leaves before other nodes are checked. So of two nodes that leave at the same
        time, neither relies on the other."""
        logged = False
        while may_wait():
            self._leaving = True
            if (await self.announce() and await self._is_replaceable()) or self._keeper.fenced:
                return
            if not logged:
                log.info("no other %s node is ready: this one continues to serve", self._lease().role)
            logged = True
            await asyncio.sleep(REPLACEMENT_CHECK_S)

    async def try_leave_role(self, rest_s: float) -> str:
        """Announce that the node wants to leave its role; return why it must keep it, empty if it may leave.

        As in `wait_for_replacement`, the lease announces it before other nodes are checked, so two nodes never leave a
        role at the same time. rest_s: the role must be kept if another node changed its role less than this many
        seconds ago."""
        if self._leaving:
            return "the node is about to end"
        self._leaving = True
        why = "the registry lacks its lease or does not answer"
        if self.held and await self.announce():
            why = await self._reason_to_keep(rest_s)
        if why:
            self.keep_role()
            await self.announce()
        return why

    def keep_role(self) -> None:
        """Withdraw the intention to leave the role; `announce` publishes it."""
        self._leaving = False

    async def has_substitute(self) -> bool:
        """Return whether another ready node of its fingerprint has the role; False if the registry does not answer."""
        return any(map(self._lease().relieved_by, await self._same_fingerprint() or ()))

    async def _reason_to_keep(self, rest_s: float) -> str:
        own, others = self._lease(), await self._same_fingerprint()
        if others is None:
            return "the registry does not answer"
        if any(node.leaving or node.state == "draining" for node in others):
            return "another node is changing its role or stopping"
        if any(0 < node.role_s < rest_s for node in others):
            return f"another node changed its role less than {rest_s:g} s ago"
        return "" if any(map(own.relieved_by, others)) else f"it is the last {own.role} node that is ready"

    def _lease(self) -> NodeLease:
        lease = self._make_lease()
        return replace(lease, leaving=True) if self._leaving else lease

    async def _is_replaceable(self) -> bool:
        """Return whether another node can replace this one; False if the registry does not answer."""
        return any(map(self._lease().relieved_by, await self._others() or ()))

    async def _same_fingerprint(self) -> list[NodeLease] | None:
        """Return the other nodes of the same fingerprint; None if the registry does not answer."""
        fingerprint, others = self._lease().fingerprint, await self._others()
        return others and [node for node in others if node.fingerprint == fingerprint]

    async def _others(self) -> list[NodeLease] | None:
        """Return the other nodes of the same model; None if the registry does not answer."""
        own = self._lease()
        try:
            async with asyncio.timeout(REDIS_CALL_S):
                nodes = await self._store.nodes()
        except (RegistryUnavailable, TimeoutError):
            return None
        return [node for node in nodes if node.node_id != own.node_id and own.serves_same(node)]

    async def leave(self, limit_s: float = REDIS_CALL_S) -> None:
        """Withdraw the lease; the node's index rows become void with it."""
        await _within(limit_s, self._keeper.stop(), *(writer.stop() for writer in self._all()))

    async def close(self) -> None:
        """Close the connections to Redis."""
        await _within(REDIS_CALL_S, self._store.close())

    def set_gauges(self) -> None:
        """Set the gauges of published and pending index rows."""
        self._metrics.index_rows.set(sum(writer.rows for writer in self._writers))
        self._metrics.index_pending.set(sum(writer.pending for writer in self._all()))

    def _restored(self) -> None:
        for writer in self._all():
            writer.republish()

    def _all(self) -> Sequence[IndexWriter | StoreRows]:
        return [*self._writers, self._store_rows] if self._store_rows else self._writers

    def _count_renewal(self, outcome: str) -> None:
        self._metrics.lease_renewals[outcome].inc()


async def new_epoch(store: RedisStore, node_id: str) -> int:
    """Return the epoch of a starting process.

    The registry assigns it, since the clock may have been set back since the last start. If the registry does not
    answer, the epoch is the clock in microseconds."""
    clock = time.time_ns() // 1000
    try:
        async with asyncio.timeout(REDIS_CALL_S):
            return await store.next_epoch(node_id, clock)
    except (RegistryUnavailable, TimeoutError):
        return clock


async def withdraw_now(store: RedisStore, lease: NodeLease) -> None:
    """Remove a lease from the registry, if the registry answers within WITHDRAW_S."""
    await _within(WITHDRAW_S, store.withdraw(lease.node_id, lease.epoch))


async def _within(seconds: float, *calls: Coroutine[Any, Any, Any]) -> None:
    """Run the calls concurrently and cancel those that exceed the limit."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*calls)
