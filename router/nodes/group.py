"""The nodes of one model, as the node table knows them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from model_files.naming import ModelName
from protocol.lease import NodeLease
from router.nodes.entry import NodeEntry, Room

log = logging.getLogger(__name__)


class NodeGroup:
    """Only nodes of one fingerprint are placed on: those with a decode node and the most members; the present ones win
    a tie, then those started last.

    name      of the model
    members   those that can work together, draining ones included
    room      what the members could still take
    """

    def __init__(self, name: ModelName) -> None:
        self.name = name
        self.members: list[NodeEntry] = []
        self.room = Room(name.first)
        self._fingerprint: str | None = None

    def keep(self, entries: Iterable[NodeEntry]) -> None:
        """These are the model's live nodes now, of any fingerprint and state."""
        entries = list(entries)
        sizes = Counter(entry.lease.fingerprint for entry in entries)

        def worth(fingerprint: str) -> tuple[bool, int, bool, int]:
            alike = [entry.lease for entry in entries if entry.lease.fingerprint == fingerprint]
            decodes = any(lease.role == "decode" for lease in alike)
            newest = max(lease.epoch for lease in alike)
            return (decodes, sizes[fingerprint], fingerprint == self._fingerprint, newest)

        self._fingerprint = max(sizes, key=worth, default=self._fingerprint)
        self.members = [entry for entry in entries if entry.lease.fingerprint == self._fingerprint]
        for entry in entries:
            fingerprint = entry.lease.fingerprint
            entry.join(fingerprint == self._fingerprint)
            if fingerprint != self._fingerprint:
                log.warning("node %s has another fingerprint (%s): not used", entry.lease.node_id, fingerprint)

    def state(self, lease: NodeLease) -> str:
        """Of a node of this model, as metrics tell it."""
        return lease.state if lease.fingerprint == self._fingerprint else "incompatible"
