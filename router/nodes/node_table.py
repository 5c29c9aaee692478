"""NodeTable: the router's live nodes, kept up to date from the registry and the token streams.

Membership comes from the registry. A node is lost if it returns with another epoch, or if its lease ends and its token
stream is not linked; its reservations are then notified. While the registry does not answer, the known nodes stay and
only their connections show whether they live; nodes relay its leases (`relayed_registry`), and a router that starts
meanwhile reads them from a file. The router waits for renewals before it trusts an empty registry, and a registry that
returned to an older state does not override a live stream."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product

from kvferry.model_files.model_name import ModelName
from kvferry.placement.types import NodeKey
from kvferry.protocol.adapters import AdapterName
from kvferry.protocol.errors import Fenced, NodeLost
from kvferry.protocol.labels import NODE_ROLES, NODE_STATES
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.nodes.circuit_breakers import CircuitBreakers
from kvferry.router.nodes.incompatible_nodes import IncompatibleNodes
from kvferry.router.nodes.lease_validation import is_same, is_valid
from kvferry.router.nodes.model_nodes import ModelNodes
from kvferry.router.nodes.node_entry import NodeEntry, node_key
from kvferry.router.nodes.node_source import LastNodes, NodeSource
from kvferry.router.nodes.registry_health import RegistryHealth
from kvferry.router.nodes.unserved_nodes import UnservedNodes, name_of
from kvferry.runtime.background import end

log = logging.getLogger(__name__)


STARTING_S = 2.0
"""Time after the first node within which more nodes are expected, in seconds."""
LONGEST_PAUSE_S = 2.0
"""Longest pause between two reads of a registry that does not answer, in seconds."""


class NodeTable:
    """Live nodes by (id, epoch).

    entries   live nodes of served models, of any fingerprint and state
    models    nodes of each model
    registry_health  health of the registry
    breakers  recent failures
    """

    def __init__(
        self,
        source: NodeSource,
        metrics: RouterMetrics,
        *,
        poll_s: float = 0.5,
        grace_s: float = 3.0,
        clock: Callable[[], float] = time.monotonic,
        last: LastNodes | None = None,
    ) -> None:
        self.entries: dict[NodeKey, NodeEntry] = {}
        self.models: list[ModelNodes] = []
        self._models: dict[NodeKey, ModelNodes] = {}
        self._unserved = UnservedNodes()
        self.incompatible_nodes = IncompatibleNodes()
        self.clock = clock
        self.registry_health = RegistryHealth(metrics, clock)
        self.breakers = CircuitBreakers(clock, metrics.quarantines.inc)
        self._source, self._metrics, self._last = source, metrics, last
        self._poll_s, self._grace_s = poll_s, grace_s
        self._listeners: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._trust_absence_at, self._first_seen_at, self._empty, self._logged_invalid = 0.0, 0.0, True, False

    async def start(self) -> None:
        """Read the registry once, or the last known nodes if it does not answer, and start polling it."""
        await self.refresh()
        if self._last is not None and not self.registry_health.up and (leases := await self._last.load()):
            log.warning("registry does not answer, starting with the last %d known nodes", len(leases))
            self._update(leases)
            for entry in self.entries.values():
                entry.forget_load()
        self._task = asyncio.create_task(self._poll(), name="node-table")

    async def stop(self) -> None:
        """Stop polling the registry, and finish saving the nodes."""
        if self._task:
            await end(self._task)
        if self._last is not None:
            await self._last.close()

    def add(self, model: ModelNodes) -> ModelNodes:
        """Add a served model; call before `start`."""
        self.models.append(model)
        return model

    def listen(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every poll that added or removed a node or changed one of its `_states`."""
        self._listeners.append(changed)

    def suspect(self, entry: NodeEntry) -> None:
        """Record that the node does not answer, which may open its breaker."""
        self.breakers.node_failed(entry.key)

    async def refresh(self) -> None:
        """Read the registry once."""
        try:
            async with asyncio.timeout(2.0):
                leases = await self._source.nodes()
        except Exception as error:
            self._unanswered(error)
            return
        self.registry_health.answered()
        self._update(leases)
        if self._last is not None:
            self._last.save(leases)

    def learn(self, leases: list[NodeLease]) -> None:
        """Take leases that nodes relay while the registry does not answer.

        They add, renew and replace nodes. Known nodes that they lack stay, because a relay may miss some."""
        known = dict(self.entries.keys())
        self._update([lease for lease in leases if lease.epoch >= known.get(lease.node_id, 0)], is_complete=False)
        if self._last is not None:
            self._last.save([entry.lease for entry in self.entries.values()])

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self.pause_s * (random.uniform(0.5, 1.0) if self.registry_health.failures else 1.0))
            try:
                await self.refresh()
            except Exception:
                log.exception("the list of nodes could not be refreshed")

    @property
    def pause_s(self) -> float:
        """Return the seconds until the next read of the registry.

        It is short until the first nodes appear, since a starting cluster waits for them, and long while the registry
        does not answer."""
        starting = not self.entries or self.clock() - self._first_seen_at < STARTING_S
        pause_s = self._poll_s / 5 if starting else self._poll_s
        return min(pause_s * 2.0 ** min(self.registry_health.failures, 10), max(LONGEST_PAUSE_S, pause_s))

    def _unanswered(self, error: Exception) -> None:
        self.registry_health.failed(error, len(self.entries))
        self._trust_absence_at = self.clock() + self._grace_s
        for entry in [each for each in self.entries.values() if self.clock() - each.leased_at > self._grace_s]:
            entry.forget_load()

    def _update(self, reported: list[NodeLease], *, is_complete: bool = True) -> None:
        """Update the nodes by these leases; is_complete: a node without a lease may have left."""
        leases = self._valid(reported)
        before = self._states()
        if is_complete:
            self._note_emptiness(not leases)
        newest = self._newest(leases)
        present = newest.keys() if is_complete else newest.keys() | {node_id for node_id, _ in self.entries}
        for key in [key for key in self.entries if self._is_lost(key, newest.get(key[0]), key[0] in present)]:
            self._lose(key, newest.get(key[0]))
        for known in self.entries.values():
            if known.linked and known.key[0] not in present:
                known.forget_load()
        for lease in newest.values():
            if entry := self.entries.get(node_key(lease)):
                entry.renew(lease)
            elif model := self._model(lease):
                entry = NodeEntry(lease, model.capacity, self.breakers.corrupt)
                self.entries[entry.key], self._models[entry.key] = entry, model
            if entry:
                entry.leased_at = self.clock()
        unserved = (lease for lease in newest.values() if node_key(lease) not in self.entries)
        self._unserved.see(unserved, [model.name for model in self.models])
        if self.incompatible_nodes.see(self._source.incompatible):
            self._count()
        if self._states() != before:
            self._regroup()
            self._count()
            for changed in self._listeners:
                changed()

    def _newest(self, leases: Iterable[NodeLease]) -> dict[str, NodeLease]:
        """Return the newest lease per node id, ignoring leases older than a node with a live stream.

        A registry that returned to an older state reports such leases."""
        linked = {node_id: epoch for (node_id, epoch), entry in self.entries.items() if entry.linked}
        by_epoch = sorted(leases, key=lambda lease: lease.epoch)
        return {lease.node_id: lease for lease in by_epoch if lease.epoch >= linked.get(lease.node_id, 0)}

    def _valid(self, leases: list[NodeLease]) -> list[NodeLease]:
        """Return the valid leases, so that an invalid one does not stop the update of other nodes.

        A known node with an invalid lease keeps its previous one."""
        invalid = [lease for lease in leases if not is_valid(lease)]
        if invalid and not self._logged_invalid:
            log.warning("invalid lease: %r", invalid[0])
        self._logged_invalid = bool(invalid)
        if not invalid:
            return leases
        known = [
            entry.lease for entry in self.entries.values() if any(is_same(entry.lease, lease) for lease in invalid)
        ]
        return [lease for lease in leases if is_valid(lease)] + known

    def _states(self) -> dict[NodeKey, tuple[str, str, str, tuple[AdapterName, ...]]]:
        """Return the fields of each node whose change is reported to listeners."""
        leases = {key: entry.lease for key, entry in self.entries.items()}
        return {key: (lease.role, lease.state, lease.fingerprint, lease.adapters) for key, lease in leases.items()}

    def _note_emptiness(self, empty: bool) -> None:
        if empty and not self._empty:
            self._trust_absence_at = max(self._trust_absence_at, self.clock() + self._grace_s)
        elif self._empty and not empty:
            self._first_seen_at = self.clock()
        self._empty = empty

    def _is_lost(self, key: NodeKey, lease: NodeLease | None, is_present: bool) -> bool:
        """Return whether a known node is lost, given the newest lease of its id."""
        if lease is not None:
            return lease.epoch != key[1]
        return not is_present and self.clock() >= self._trust_absence_at and not self.entries[key].linked

    def _lose(self, key: NodeKey, successor: NodeLease | None) -> None:
        log.warning("node %s (epoch %d) is lost", *key)
        del self._models[key]
        lost = Fenced(f"{key[0]} is now epoch {successor.epoch}") if successor else NodeLost(f"{key[0]} lost its lease")
        self.entries.pop(key).lose(lost)

    def _model(self, lease: NodeLease) -> ModelNodes | None:
        """Return the model that the node runs, by its names; None if none or several match."""
        name = name_of(lease)
        for matches in (ModelName.shares, ModelName.resembles):
            if found := [model for model in self.models if matches(model.name, name)]:
                return found[0] if len(found) == 1 else None
        return None

    def _regroup(self) -> None:
        for model in self.models:
            model.keep(entry for entry in self.entries.values() if self._models[entry.key] is model)

    def _count(self) -> None:
        models = [(entry.lease, self._models[entry.key]) for entry in self.entries.values()]
        counts = Counter((lease.role, lease.state, model.name.first) for lease, model in models)
        for role, state, model in product(NODE_ROLES, NODE_STATES, self.models):
            self._metrics.nodes.labels(role, state, model.name.first).set(counts[role, state, model.name.first])
        for role in NODE_ROLES:
            self._metrics.nodes.labels(role, "incompatible", "").set(self.incompatible_nodes.roles[role])
