"""The router's view of the live nodes, and its own bookings on them.

Membership comes from the registry; a node that loses its lease or comes back with another epoch is lost, and everything
booked on it is told. While the registry does not answer, the last known nodes stay: whether they live is then seen by
their connections alone. A registry that came back empty is not believed before its nodes had time to renew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from placement.costs import NodeKey, NodeView
from protocol.errors import NodeLost
from protocol.messages import Load, NodeLease
from protocol.metrics import RouterMetrics
from router.nodes.bookings import Book, Booking

log = logging.getLogger(__name__)


class NodeSource(Protocol):
    """The registry, as far as the router needs it."""

    async def nodes(self) -> list[NodeLease]:
        """Every node with a live lease. Raises when the registry cannot be reached."""


STARTING_S = 2.0
"""After the first node appeared, others are expected."""


def node_key(lease: NodeLease) -> NodeKey:
    return (lease.node_id, lease.epoch)


class NodeTable:
    """Live nodes by (id, epoch). Only nodes of one fingerprint are placed on: the group with a decode node and the most
    members; the present group wins a tie, then the one started last."""

    def __init__(
        self,
        source: NodeSource,
        metrics: RouterMetrics,
        *,
        poll_s: float = 0.5,
        grace_s: float = 3.0,
        suspect_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._metrics, self._clock = source, metrics, clock
        self._poll_s, self._grace_s, self._suspect_s = poll_s, grace_s, suspect_s
        self._nodes: dict[NodeKey, NodeLease] = {}
        self._books: dict[NodeKey, Book] = {}
        self._suspects: dict[NodeKey, float] = {}
        self._listeners: list[Callable[[], None]] = []
        self._fingerprint: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._up = False
        self._answered_at = clock()
        self._believe_absence_at = self._first_seen_at = 0.0
        self._empty = True

    async def start(self) -> None:
        await self.refresh()
        self._task = asyncio.create_task(self._poll(), name="node-table")

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def up(self) -> bool:
        """Whether the registry answered the last poll."""
        return self._up

    def listen(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every poll that added, removed or changed the state of a node."""
        self._listeners.append(changed)

    def known(self) -> list[NodeLease]:
        """All live nodes, of any fingerprint and state."""
        return list(self._nodes.values())

    def group(self) -> list[NodeLease]:
        """The live nodes that can work together, draining ones included."""
        return [lease for lease in self._nodes.values() if lease.fingerprint == self._fingerprint]

    def alive(self, key: NodeKey) -> bool:
        return key in self._nodes

    def suspected(self, key: NodeKey) -> bool:
        """Whether a connection to the node failed a moment ago."""
        return self._suspects.get(key, 0.0) > self._clock()

    def suspect(self, key: NodeKey) -> None:
        """A connection to the node failed: nothing new goes there for a moment."""
        self._suspects[key] = self._clock() + self._suspect_s

    def views(self, reuse_blocks: Mapping[str, int]) -> list[NodeView]:
        """The group's nodes for one placement; `reuse_blocks` by node id."""
        stale = self._clock() - self._answered_at > self._grace_s
        return [self._view(lease, reuse_blocks.get(lease.node_id, 0), stale) for lease in self.group()]

    def book(self, lease: NodeLease, *, tokens: int, blocks: int, lost: Callable[[NodeLost], None]) -> Booking:
        """Count a request on a node from now on. Raises NodeLost if the node is gone."""
        book = self._books.get(node_key(lease))
        if book is None:
            raise NodeLost(f"{lease.node_id} is gone")
        booking = Booking(node_key(lease), tokens, blocks, lost, book)
        book.bookings.add(booking)
        book.add(tokens, blocks, 1)
        return booking

    async def refresh(self) -> None:
        """Read the registry once."""
        try:
            async with asyncio.timeout(2.0):
                leases = await self._source.nodes()
        except Exception as error:
            if self._up or not self._nodes:
                log.warning("registry does not answer, keeping %d nodes: %r", len(self._nodes), error)
            self._up = False
            self._believe_absence_at = self._clock() + self._grace_s
            self._metrics.registry_up.set(0)
            return
        self._up, self._answered_at = True, self._clock()
        self._metrics.registry_up.set(1)
        self._take(leases)

    async def _poll(self) -> None:
        """More often until the first nodes are there: a cluster that starts waits for this."""
        while True:
            starting = not self._nodes or self._clock() - self._first_seen_at < STARTING_S
            await asyncio.sleep(self._poll_s / 5 if starting else self._poll_s)
            await self.refresh()

    def _take(self, leases: list[NodeLease]) -> None:
        before = {key: lease.state for key, lease in self._nodes.items()}
        if leases:
            self._first_seen_at = self._clock() if self._empty else self._first_seen_at
            self._empty = False
        elif not self._empty:
            self._empty = True
            self._believe_absence_at = max(self._believe_absence_at, self._clock() + self._grace_s)
        newest: dict[str, NodeLease] = {}
        for lease in sorted(leases, key=lambda lease: lease.epoch):
            newest[lease.node_id] = lease
        for key in list(self._nodes):
            now = newest.get(key[0])
            if now is None and self._clock() < self._believe_absence_at:
                continue
            if now is None or now.epoch != key[1]:
                self._lose(key)
        for lease in newest.values():
            key = node_key(lease)
            self._nodes[key] = lease
            self._books.setdefault(key, Book()).roll()
        if {key: lease.state for key, lease in self._nodes.items()} != before:
            self._choose_group()
            self._count()
            for changed in self._listeners:
                changed()

    def _lose(self, key: NodeKey) -> None:
        lease = self._nodes.pop(key)
        self._suspects.pop(key, None)
        log.warning("node %s (epoch %d) is lost", *key)
        for booking in list(self._books.pop(key).bookings):
            booking.lost(NodeLost(f"{lease.node_id} lost its lease"))

    def _choose_group(self) -> None:
        sizes = Counter(lease.fingerprint for lease in self._nodes.values())

        def worth(fingerprint: str) -> tuple[bool, int, bool, int]:
            members = [lease for lease in self._nodes.values() if lease.fingerprint == fingerprint]
            decodes = any(lease.role == "decode" for lease in members)
            newest = max(lease.epoch for lease in members)
            return (decodes, sizes[fingerprint], fingerprint == self._fingerprint, newest)

        self._fingerprint = max(sizes, key=worth, default=self._fingerprint)
        for lease in self._nodes.values():
            if lease.fingerprint != self._fingerprint:
                log.warning("node %s has another fingerprint (%s): not used", lease.node_id, lease.fingerprint)

    def _count(self) -> None:
        counts = Counter((lease.role, self._state(lease)) for lease in self._nodes.values())
        for role in ("prefill", "decode"):
            for state in ("ready", "draining", "incompatible"):
                self._metrics.nodes.labels(role, state).set(counts[role, state])

    def _state(self, lease: NodeLease) -> str:
        return lease.state if lease.fingerprint == self._fingerprint else "incompatible"

    def _view(self, lease: NodeLease, reuse_blocks: int, stale: bool) -> NodeView:
        if stale:
            total = lease.load.total_blocks
            lease = replace(lease, load=Load(total_blocks=total, free_blocks=total))
        load = lease.load
        queued_blocks = -(-load.waiting_tokens // lease.block_size) if lease.role == "decode" else 0
        tokens, blocks, requests = self._books[node_key(lease)].counted(
            load.waiting_tokens, load.granted_blocks + queued_blocks, load.running_requests + load.waiting_requests
        )
        return NodeView(lease, reuse_blocks * lease.block_size, tokens, requests, blocks)
