"""Nodes of one model in the node table."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product

from kvferry.cluster_state.index import ON_STORE, STORE_EPOCH, on_tier, owner
from kvferry.model_files.model_name import ModelName
from kvferry.placement.types import NodeView, TierPrefix
from kvferry.protocol.labels import OWN_TIERS
from kvferry.protocol.lease import NodeLease
from kvferry.router.nodes.capacity_summary import CapacitySummary
from kvferry.router.nodes.node_entry import NodeEntry

log = logging.getLogger(__name__)


class ModelNodes:
    """Only nodes of one fingerprint are placed on: those with a decode node that stays and the most members; the
    present ones win a tie, then those started last.

    name      of the model
    members   those that can work together, draining ones included
    room      what the members could still take
    epochs    of the members, by their ids, and by `index.on_tier` of these
    """

    def __init__(self, name: ModelName) -> None:
        self.name = name
        self._nodes: list[NodeEntry] = []
        self.members: list[NodeEntry] = []
        self.epochs: dict[str, int] = {}
        self.room = CapacitySummary(name.first)
        self._fingerprint: str | None = None

    def keep(self, entries: Iterable[NodeEntry]) -> None:
        """These are the model's live nodes now, of any fingerprint and state."""
        entries = self._nodes = list(entries)
        sizes = Counter(entry.lease.fingerprint for entry in entries)

        def worth(fingerprint: str) -> tuple[bool, int, bool, int]:
            alike = [entry.lease for entry in entries if entry.lease.fingerprint == fingerprint]
            decodes = any(lease.role == "decode" and lease.state == "ready" for lease in alike)
            newest = max(lease.epoch for lease in alike)
            return (decodes, sizes[fingerprint], fingerprint == self._fingerprint, newest)

        self._fingerprint = max(sizes, key=worth, default=self._fingerprint)
        self.members = [entry for entry in entries if entry.lease.fingerprint == self._fingerprint]
        self.epochs = dict(entry.key for entry in self.members)
        for (node_id, epoch), tier in product(list(self.epochs.items()), OWN_TIERS):
            self.epochs[on_tier(node_id, tier)] = epoch
        for entry in entries:
            fingerprint = entry.lease.fingerprint
            entry.join(fingerprint == self._fingerprint)
            if fingerprint != self._fingerprint:
                log.warning("node %s has another fingerprint (%s): not used", entry.lease.node_id, fingerprint)

    def views(self, held: Mapping[str, int], adapter: str) -> list[NodeView]:
        """The members that answer and hold the adapter, if one is asked for, with what they hold of a prompt: leading
        blocks by node id, and by `index.on_tier` of it."""
        views = self.room.views.copy()
        for name in held:
            key = (owner(name), self.epochs.get(name, 0))
            if key in views:
                views[key] = _holding(self.room.views[key], held)
        found = list(views.values())
        return [view for view in found if holds(view.lease, adapter)] if adapter else found

    @property
    def names(self) -> dict[str, int]:
        """Under which what members have, or may read, stands in the index, with their epochs."""
        shared = any(entry.lease.rates.store_block_s for entry in self.members)
        return {**self.epochs, ON_STORE: STORE_EPOCH} if shared else self.epochs

    def stored_len(self, held: Mapping[str, int], total_len: int) -> int:
        """Leading tokens of so many that members find in the store that they share, in whole blocks, never the last."""
        if not (blocks := held.get(ON_STORE, 0)) or not self.members:
            return 0
        size = self.members[0].lease.block_size
        return min(blocks * size, total_len - 1) // size * size

    def leases(self) -> list[NodeLease]:
        """Return the leases of all the model's live nodes, of any fingerprint and state."""
        return [entry.lease for entry in self._nodes]

    def state(self, lease: NodeLease) -> str:
        """Return a node's state, as metrics show it."""
        return lease.state if lease.fingerprint == self._fingerprint else "incompatible"


def _holding(view: NodeView, held: Mapping[str, int]) -> NodeView:
    lease = view.lease
    cached = held.get(lease.node_id, 0)
    kept = tuple(
        TierPrefix(blocks * lease.block_size, block_s)
        for name, block_s in tiers(lease)
        if (blocks := held.get(name, 0))
    )
    if not (cached or kept):
        return view
    return replace(view, cached_len=cached * lease.block_size, kept=kept)


def tiers(lease: NodeLease) -> Iterator[tuple[str, float]]:
    """Return the node's own tiers, quickest first: the name of their rows and the seconds to read a block."""
    rates = lease.rates
    for tier, block_s in zip(OWN_TIERS, (rates.host_block_s, rates.disk_block_s), strict=True):
        if block_s:
            yield on_tier(lease.node_id, tier), block_s


def holds(lease: NodeLease, adapter: str) -> bool:
    """Return whether the node has the adapter of this id; without one any has."""
    return not adapter or any(each.id == adapter for each in lease.adapters)
