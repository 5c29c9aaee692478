"""The nodes of one model, as the node table knows them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from cluster_state.index import on_disk, owner
from model_files.naming import ModelName
from placement.terms import NodeView
from protocol.lease import NodeLease
from router.nodes.entry import NodeEntry, Room

log = logging.getLogger(__name__)


class NodeGroup:
    """Only nodes of one fingerprint are placed on: those with a decode node that stays and the most members; the
    present ones win a tie, then those started last.

    name      of the model
    members   those that can work together, draining ones included
    room      what the members could still take
    epochs    of the members, by their ids, and by `index.on_disk` of these
    """

    def __init__(self, name: ModelName) -> None:
        self.name = name
        self._nodes: list[NodeEntry] = []
        self.members: list[NodeEntry] = []
        self.epochs: dict[str, int] = {}
        self.room = Room(name.first)
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
        self.epochs.update([(on_disk(node_id), epoch) for node_id, epoch in self.epochs.items()])
        for entry in entries:
            fingerprint = entry.lease.fingerprint
            entry.join(fingerprint == self._fingerprint)
            if fingerprint != self._fingerprint:
                log.warning("node %s has another fingerprint (%s): not used", entry.lease.node_id, fingerprint)

    def views(self, held: Mapping[str, int], adapter: str) -> list[NodeView]:
        """The members that answer and hold the adapter, if one is asked for, with what they hold of a prompt: leading
        blocks by node id, and by `index.on_disk` of it."""
        views = self.room.views.copy()
        for name in held:
            key = (owner(name), self.epochs.get(name, 0))
            if key in views:
                views[key] = _holding(self.room.views[key], held)
        found = list(views.values())
        return [view for view in found if holds(view.lease, adapter)] if adapter else found

    def leases(self) -> list[NodeLease]:
        """Of all the model's live nodes, of any fingerprint and state."""
        return [entry.lease for entry in self._nodes]

    def state(self, lease: NodeLease) -> str:
        """Of a node of this model, as metrics tell it."""
        return lease.state if lease.fingerprint == self._fingerprint else "incompatible"


def _holding(view: NodeView, held: Mapping[str, int]) -> NodeView:
    lease = view.lease
    cached = held.get(lease.node_id, 0)
    kept = held.get(on_disk(lease.node_id), 0) if lease.rates.read_block_s else 0
    if not (cached or kept):
        return view
    return replace(view, cached_len=cached * lease.block_size, kept_len=kept * lease.block_size)


def holds(lease: NodeLease, adapter: str) -> bool:
    """Whether the node has the adapter of this id; without one any has."""
    return not adapter or any(each.id == adapter for each in lease.adapters)
