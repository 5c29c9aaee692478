"""Nodes with another wire version: logged once and never used."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from kvferry.protocol.labels import ROLES
from kvferry.protocol.layout import WIRE_VERSION
from kvferry.protocol.lease import IncompatibleLease

log = logging.getLogger(__name__)


class IncompatibleNodes:
    """Nodes of another wire version; `roles` counts them by role."""

    def __init__(self) -> None:
        self.roles: Counter[str] = Counter()
        self._known: frozenset[IncompatibleLease] = frozenset()

    def see(self, nodes: Iterable[IncompatibleLease]) -> bool:
        """Update the nodes from the registry; return whether anything changed."""
        seen = frozenset(nodes)
        for node in sorted(seen - self._known, key=lambda each: each.node_id):
            log.error(
                "node %s speaks wire version %d and this router %d: not used until both run the same release",
                node.node_id, node.version, WIRE_VERSION,
            )  # fmt: skip
        changed, self._known = seen != self._known, seen
        self.roles = Counter(node.role for node in seen if node.role in ROLES)
        return changed
