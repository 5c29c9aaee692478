"""Readiness: says why a starting router may not replace its predecessor yet, until it knows usable nodes."""

from __future__ import annotations

from kvferry.router.nodes.node_table import NodeTable

OTHERS = "the only nodes that can decode are of another wire version or cluster secret, and this router cannot use them"


class Readiness:
    """Implements `Cluster.trouble`: the reason why the router is not ready, or an empty string.

    Nodes of another wire version do not announce their model. One ready decode node of any model shows that nodes
    that this router can use have started."""

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._yes = False

    def __call__(self) -> str:
        if self._yes:
            return ""
        others = self._nodes.incompatible_nodes.roles["decode"]
        why = self._nodes.contact.trouble or (OTHERS if others and not self._decodes() else "")
        self._yes = not why
        return why

    def _decodes(self) -> bool:
        entries = self._nodes.entries.values()
        return any(e.lease.role == "decode" and e.lease.state == "ready" and e.reachable for e in entries)
