"""IncompatibleNodes: nodes of another wire version or without the cluster's seal; counted and logged, never used."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from kvferry.protocol.labels import NODE_ROLES
from kvferry.protocol.lease import IncompatibleLease

log = logging.getLogger(__name__)


class IncompatibleNodes:
    """Nodes whose leases cannot be used; `roles` counts them by role."""

    def __init__(self) -> None:
        self.roles: Counter[str] = Counter()
        self._known: frozenset[IncompatibleLease] = frozenset()

    def see(self, nodes: Iterable[IncompatibleLease]) -> bool:
        """Update the nodes from the registry; return whether anything changed."""
        seen = frozenset(nodes)
        for node in sorted(seen - self._known, key=lambda each: each.node_id):
            log.error("node %s %s: not used", node.node_id, node.why)
        changed, self._known = seen != self._known, seen
        self.roles = Counter(node.role for node in seen if node.role in NODE_ROLES)
        return changed
