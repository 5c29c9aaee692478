"""Prefixes in flight: prompts sent to nodes that have not computed them yet.

The index tells only what is computed. Of requests that share a prefix and come faster than that, each would look for
the shortest queue and compute it anew; an engine looks into its cache when a prompt's turn comes, and anyone who
follows one with the same prefix finds it there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from kvferry.cluster_state.prefixes import longest
from kvferry.placement.types import NodeKey

LOOKED_AT = 64
"""Prompts that begin alike, the last ones sent: more of them would tell nothing new."""


class ExpectedPrefix:
    """Blocks of one prompt on their way into a node's cache, until `over`: computed, or given up."""

    __slots__ = ("_rows", "hashes", "node")

    def __init__(self, hashes: Sequence[bytes], node: NodeKey, rows: Rows) -> None:
        self.hashes, self.node, self._rows = hashes, node, rows
        if hashes:
            rows.setdefault(hashes[0], {})[self] = None

    def over(self) -> None:
        """May be called again."""
        row = self._rows.get(self.hashes[0], {}) if self.hashes else {}
        row.pop(self, None)
        if self.hashes and not row:
            self._rows.pop(self.hashes[0], None)


Rows = dict[bytes, dict[ExpectedPrefix, None]]
"""Prompts by their first block, the last one sent last."""


class InflightPrefixes:
    """All of them. Sending one costs the same whatever its length."""

    def __init__(self) -> None:
        self._rows: Rows = {}

    def sent(self, hashes: Sequence[bytes], node: NodeKey) -> ExpectedPrefix:
        """A prompt of these full blocks is to be computed there."""
        return ExpectedPrefix(hashes, node, self._rows)

    def held(self, hashes: Sequence[bytes], nodes: Mapping[str, int]) -> dict[str, int]:
        """Leading blocks that will be held, by node id, of nodes given with their epoch."""
        found: dict[str, int] = {}
        for each in islice(reversed(self._rows.get(hashes[0], {}) if hashes else {}), LOOKED_AT):
            node_id, epoch = each.node
            if nodes.get(node_id) == epoch:
                shared = _shared(hashes, each.hashes)
                found[node_id] = max(shared, found.get(node_id, 0))
        return found


def _shared(hashes: Sequence[bytes], others: Sequence[bytes]) -> int:
    """Leading blocks that are equal; a block's hash tells of all before it."""
    return longest(min(len(hashes), len(others)), lambda place: hashes[place] == others[place])
