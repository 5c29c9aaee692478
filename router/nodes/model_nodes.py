"""Nodes of one model, grouped by fingerprint; placement uses one group."""

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
    """Nodes of one model, grouped by fingerprint; placement uses one group only.

    The group with a ready decode node and the most members wins. In a tie the current group wins, then the most
    recently started one.

    name     of the model
    members  nodes of the group, draining ones included
    room     capacity that the members have left
    epochs   epochs of the members, by their ids and by `index.on_tier` of these
    """

    def __init__(self, name: ModelName) -> None:
        self.name = name
        self._nodes: list[NodeEntry] = []
        self.members: list[NodeEntry] = []
        self.epochs: dict[str, int] = {}
        self.room = CapacitySummary(name.first)
        self._fingerprint: str | None = None

    def keep(self, entries: Iterable[NodeEntry]) -> None:
        """Update the model's live nodes, of any fingerprint and state, and choose the group."""
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
        """Return the reachable members, with the adapter if one is given, and what they hold of a prompt.

        `held` counts leading blocks by node id, and by `index.on_tier` of it."""
        views = self.room.views.copy()
        for name in held:
            key = (owner(name), self.epochs.get(name, 0))
            if key in views:
                views[key] = _holding(self.room.views[key], held)
        found = list(views.values())
        return [view for view in found if holds(view.lease, adapter)] if adapter else found

    @property
    def names(self) -> dict[str, int]:
        """Return the index names of blocks that members hold or can read, with their epochs."""
        shared = any(entry.lease.rates.store_block_s for entry in self.members)
        return {**self.epochs, ON_STORE: STORE_EPOCH} if shared else self.epochs

    def stored_len(self, held: Mapping[str, int], total_len: int) -> int:
        """Return the leading tokens that members find in their shared store: whole blocks, never the last token."""
        if not (blocks := held.get(ON_STORE, 0)) or not self.members:
            return 0
        size = self.members[0].lease.block_size
        return min(blocks * size, total_len - 1) // size * size

    def leases(self) -> list[NodeLease]:
        """Return the leases of all the model's live nodes, of any fingerprint and state."""
        return [entry.lease for entry in self._nodes]

    def state(self, lease: NodeLease) -> str:
        """Return a node's state for the metrics."""
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
    """Yield the node's own tiers, fastest first: the index name and the seconds to read a block."""
    rates = lease.rates
    for tier, block_s in zip(OWN_TIERS, (rates.host_block_s, rates.disk_block_s), strict=True):
        if block_s:
            yield on_tier(lease.node_id, tier), block_s


def holds(lease: NodeLease, adapter: str) -> bool:
    """Return whether the node has the adapter of this id; true for the empty id."""
    return not adapter or any(each.id == adapter for each in lease.adapters)
