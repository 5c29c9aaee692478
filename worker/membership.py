"""Membership of a node in the cluster: its lease and its rows of the block index."""

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

RELIEF_S = 0.5
"""Between two looks for a node that could serve in the place of the last one."""
LAST_WORD_S = 0.5
"""What withdrawing the lease may take when a thread has ended or hangs: the process is to be restarted at once."""
LEAVE_S = 1.0
"""What each last word to Redis may take: a Redis that hangs must not keep a node from ending."""


class Kept(Protocol):
    """Blocks in a tier, by their rows. changed: to be told (stored, removed), from any thread."""

    changed: Callable[[Sequence[bytes], Sequence[bytes]], None]

    def rows(self) -> list[bytes]: ...


class Own(Kept, Protocol):
    """A tier with a name of its own in the index."""

    @property
    def name(self) -> str: ...


class Membership:
    """Kept up from `join` to `leave`. Redis may come and go; nothing here raises.

    make_lease   the node's row in the registry, as of now
    findable     rows of all blocks in its pool that can be reused, parents before children
    kept         the tiers that are its own, which then tell of changes here
    shared       what it knows of the blocks in a store that others read and write, too; None: it has none
    note         what changed of the pool: (stored, removed); from any thread
    """

    def __init__(
        self,
        store: RedisStore,
        make_lease: Callable[[], NodeLease],
        findable: Callable[[], Iterable[bytes]],
        metrics: WorkerMetrics,
        kept: Sequence[Own] = (),
        shared: Kept | None = None,
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
        """Return whether the registry has the node's lease, as far as can be known."""
        return self._keeper.held

    @property
    def trouble(self) -> str:
        """Return why the registry lacks the node; empty while it does not."""
        return self._keeper.trouble

    async def join(self) -> None:
        """Begin to announce the node and its blocks; returns once the registry has its lease."""
        for writer in self._all():
            await writer.start()
        self._keeper.start()
        await self._keeper.first_held()

    async def announce(self) -> bool:
        """The node's state changed: tell it now. Whether the registry took it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                return await self._keeper.announce_now()
        return False

    async def relief(self, may_wait: Callable[[], bool]) -> None:
        """Returns once another node of the role that serves the same model is ready and stays, or one must not wait for
        it any more. The lease says that this one leaves before it looks: of two that leave at once, neither counts on
        the other."""
        told = False
        while may_wait():
            self._leaving = True
            if (await self.announce() and await self._relieved()) or self._keeper.fenced:
                return
            if not told:
                log.info("nobody else is known to do what this %s node does: it serves on", self._lease().role)
            told = True
            await asyncio.sleep(RELIEF_S)

    async def step_back(self, rest_s: float) -> str:
        """Announce that the node wants to leave its role; return why it must keep it, empty if it may leave.

        As in `relief`, that is said before anybody is looked for: of two that step back at once, neither does."""
        if self._leaving:
            return "the node is about to end"
        self._leaving = True
        why = "the registry does not have its lease, or does not answer"
        if self.held and await self.announce():
            why = await self._kept_by(rest_s)
        if why:
            self.stay()
            await self.announce()
        return why

    def stay(self) -> None:
        """It does not leave, anyone who asked it to change its role; `announce` tells."""
        self._leaving = False

    async def spared(self) -> bool:
        """Return whether others of the role are still there; no, while the registry does not answer."""
        return await self._relieved()

    async def _kept_by(self, rest_s: float) -> str:
        own, others = self._lease(), await self._others()
        if others is None:
            return "the registry does not answer"
        if any(node.leaving or node.state == "draining" for node in others):
            return "another node changes its role, or ends"
        if any(0 < node.role_s < rest_s for node in others):
            return f"another node changed its role less than {rest_s:g} s ago"
        return "" if any(map(own.relieved_by, others)) else f"it is the last {own.role} node that is ready"

    def _lease(self) -> NodeLease:
        lease = self._make_lease()
        return replace(lease, leaving=True) if self._leaving else lease

    async def _relieved(self) -> bool:
        """Nobody can tell while the registry does not answer: then no."""
        return any(map(self._lease().relieved_by, await self._others() or ()))

    async def _others(self) -> list[NodeLease] | None:
        """Those that serve the same model; None while the registry does not answer."""
        own = self._lease()
        try:
            async with asyncio.timeout(LEAVE_S):
                nodes = await self._store.nodes()
        except (RegistryUnavailable, TimeoutError):
            return None
        return [node for node in nodes if node.node_id != own.node_id and own.serves_same(node)]

    async def leave(self, limit_s: float = LEAVE_S) -> None:
        """Withdraw the lease; rows end with it."""
        await _within(limit_s, self._keeper.stop(), *(writer.stop() for writer in self._all()))

    async def close(self) -> None:
        """Close the connections to Redis."""
        await _within(LEAVE_S, self._store.close())

    def set_gauges(self) -> None:
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
    """The epoch of a process that starts: as the registry gives it, for a clock may have been set back since the last
    start; by the clock where the registry does not answer."""
    clock = time.time_ns() // 1000
    try:
        async with asyncio.timeout(LEAVE_S):
            return await store.next_epoch(node_id, clock)
    except (RegistryUnavailable, TimeoutError):
        return clock


async def withdraw_now(store: RedisStore, lease: NodeLease) -> None:
    """Take a lease out of the registry, if that answers at once."""
    await _within(LAST_WORD_S, store.withdraw(lease.node_id, lease.epoch))


async def _within(seconds: float, *calls: Coroutine[Any, Any, Any]) -> None:
    """Run the calls at once and give up those that take longer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*calls)
