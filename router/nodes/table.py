"""The router's view of the live nodes.

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
from collections.abc import Callable, Iterable
from itertools import product
from typing import Protocol

from model_files.naming import ModelName
from placement.terms import NodeKey
from protocol.adapters import AdapterName
from protocol.errors import NodeLost
from protocol.lease import NodeLease
from protocol.metrics import NODE_STATES, ROLES, RouterMetrics
from router.nodes.entry import NodeEntry, node_key
from router.nodes.group import NodeGroup
from router.nodes.soundness import is_same, is_sound

log = logging.getLogger(__name__)


class NodeSource(Protocol):
    """The registry, as far as the router needs it."""

    async def nodes(self) -> list[NodeLease]:
        """Every node with a live lease. Raises when the registry cannot be reached."""


STARTING_S = 2.0
"""After the first node appeared, others are expected."""
LONGEST_PAUSE_S = 2.0
"""Between two questions to a registry that does not answer."""


class NodeTable:
    """Live nodes by (id, epoch).

    entries   all live nodes of served models, of any fingerprint and state
    groups    a model's each
    up        whether the registry answered the last question
    """

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
        self.entries: dict[NodeKey, NodeEntry] = {}
        self.groups: list[NodeGroup] = []
        self._groups: dict[NodeKey, NodeGroup] = {}
        self._strangers: set[NodeKey] = set()
        self.up = False
        self.clock = clock
        self._source, self._metrics = source, metrics
        self._poll_s, self._grace_s, self._suspect_s = poll_s, grace_s, suspect_s
        self._listeners: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._answered_at = clock()
        self._believe_absence_at = self._first_seen_at = 0.0
        self._empty, self._told_unsound = True, False

    async def start(self) -> None:
        await self.refresh()
        self._task = asyncio.create_task(self._poll(), name="node-table")

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def add(self, group: NodeGroup) -> NodeGroup:
        """Follow the nodes of one more model; before `start`."""
        self.groups.append(group)
        return group

    def listen(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every poll that added or removed a node, or changed its state or its adapters."""
        self._listeners.append(changed)

    def suspect(self, entry: NodeEntry) -> None:
        """A connection to the node failed: nothing new goes there for a moment."""
        entry.suspected_until = self.clock() + self._suspect_s

    async def refresh(self) -> None:
        """Read the registry once."""
        try:
            async with asyncio.timeout(2.0):
                leases = await self._source.nodes()
        except Exception as error:
            self._unanswered(error)
            return
        if self._failures:
            log.info("registry answers again")
        self.up, self._failures, self._answered_at = True, 0, self.clock()
        self._metrics.registry_up.set(1)
        self._take(leases)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self.pause_s)
            try:
                await self.refresh()
            except Exception:
                log.exception("the nodes could not be brought up to date")

    @property
    def pause_s(self) -> float:
        """Until the next question: short until the first nodes are there, for a cluster that starts waits for this;
        long while there is no answer."""
        starting = not self.entries or self.clock() - self._first_seen_at < STARTING_S
        pause_s = self._poll_s / 5 if starting else self._poll_s
        return min(pause_s * 2.0 ** min(self._failures, 10), max(LONGEST_PAUSE_S, pause_s))

    def _unanswered(self, error: Exception) -> None:
        if not self._failures:
            log.warning("registry does not answer, keeping %d nodes: %r", len(self.entries), error)
        self._failures += 1
        self.up = False
        self._believe_absence_at = self.clock() + self._grace_s
        self._metrics.registry_up.set(0)
        if self.clock() - self._answered_at > self._grace_s:
            for entry in self.entries.values():
                entry.forget_load()

    def _take(self, told: list[NodeLease]) -> None:
        leases = self._sound(told)
        before = self._states()
        self._notice_emptiness(not leases)
        newest = {lease.node_id: lease for lease in sorted(leases, key=lambda lease: lease.epoch)}
        for key in [key for key in self.entries if self._is_lost(key, newest.get(key[0]))]:
            self._lose(key)
        for lease in newest.values():
            if entry := self.entries.get(node_key(lease)):
                entry.renew(lease)
            elif group := self._group(lease):
                entry = NodeEntry(lease, group.room)
                self.entries[entry.key], self._groups[entry.key] = entry, group
        self._tell_strangers(newest.values())
        if self._states() != before:
            self._regroup()
            self._count()
            for changed in self._listeners:
                changed()

    def _sound(self, leases: list[NodeLease]) -> list[NodeLease]:
        """Those that can be reckoned with: one that cannot must not end the following of all. A node that is known
        stays as it was known."""
        odd = [lease for lease in leases if not is_sound(lease)]
        if odd and not self._told_unsound:
            log.warning("a lease makes no sense: %r", odd[0])
        self._told_unsound = bool(odd)
        if not odd:
            return leases
        known = [entry.lease for entry in self.entries.values() if any(is_same(entry.lease, lease) for lease in odd)]
        return [lease for lease in leases if is_sound(lease)] + known

    def _states(self) -> dict[NodeKey, tuple[str, tuple[AdapterName, ...]]]:
        return {key: (entry.lease.state, entry.lease.adapters) for key, entry in self.entries.items()}

    def _notice_emptiness(self, empty: bool) -> None:
        if empty and not self._empty:
            self._believe_absence_at = max(self._believe_absence_at, self.clock() + self._grace_s)
        elif self._empty and not empty:
            self._first_seen_at = self.clock()
        self._empty = empty

    def _is_lost(self, key: NodeKey, lease: NodeLease | None) -> bool:
        """`lease`: the newest of the node's id."""
        return self.clock() >= self._believe_absence_at if lease is None else lease.epoch != key[1]

    def _lose(self, key: NodeKey) -> None:
        log.warning("node %s (epoch %d) is lost", *key)
        del self._groups[key]
        self.entries.pop(key).lose(NodeLost(f"{key[0]} lost its lease"))

    def _group(self, lease: NodeLease) -> NodeGroup | None:
        """Whose model the node runs, by what it is called; None: nobody's, or it cannot be told."""
        name = _name(lease)
        for alike in (ModelName.shares, ModelName.resembles):
            if found := [group for group in self.groups if alike(group.name, name)]:
                return found[0] if len(found) == 1 else None
        return None

    def _tell_strangers(self, leases: Iterable[NodeLease]) -> None:
        """The log has a line for each node that runs none of the models."""
        strangers = {node_key(lease): lease for lease in leases if node_key(lease) not in self.entries}
        for key in strangers.keys() - self._strangers:
            served = ", ".join(repr(name) for group in self.groups for name in group.name.all)
            log.warning(
                "node %s runs %r and this router serves %s: not used. If it is the same model, give both one "
                "--served-model-name", key[0], _name(strangers[key]).first, served,
            )  # fmt: skip
        self._strangers = set(strangers)

    def _regroup(self) -> None:
        for group in self.groups:
            group.keep(entry for entry in self.entries.values() if self._groups[entry.key] is group)

    def _count(self) -> None:
        counts = Counter(
            (entry.lease.role, self._groups[entry.key].state(entry.lease)) for entry in self.entries.values()
        )
        for role, state in product(ROLES, NODE_STATES):
            self._metrics.nodes.labels(role, state).set(counts[role, state])


def _name(lease: NodeLease) -> ModelName:
    return ModelName(lease.model, lease.served_names)
