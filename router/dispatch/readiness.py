"""Readiness: says why a starting router may not replace its predecessor yet, until it knows usable nodes."""

from __future__ import annotations

from kvferry.router.nodes.node_table import NodeTable

INCOMPATIBLE = (
    "the only nodes that can decode are of another wire version or cluster secret, and this router cannot use them"
)


class Readiness:
    """Implements `Cluster.trouble`: the reason why the router is not ready, or an empty string.

    One ready decode node that answers this router is enough, also if it is known from an earlier start alone. Nodes of
    another wire version do not announce their model, so any model's decode node counts."""

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._is_ready = False

    def __call__(self) -> str:
        if self._is_ready:
            return ""
        others = self._nodes.incompatible_nodes.roles["decode"]
        why = "" if self._decodes() else self._nodes.registry_health.trouble or (INCOMPATIBLE if others else "")
        self._is_ready = not why
        return why

    def _decodes(self) -> bool:
        entries = self._nodes.entries.values()
        return any(e.lease.role == "decode" and e.lease.state == "ready" and e.reachable for e in entries)
