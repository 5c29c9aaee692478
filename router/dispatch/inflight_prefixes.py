"""InflightPrefixes: prompts sent to nodes but not computed yet, so that requests with the same prefix can follow.

The index lists only computed blocks. Without this table, requests that share a prefix and arrive faster than it is
computed would each choose the shortest queue and compute it again. An engine checks its cache when a prompt's turn
comes, so a request that follows another to the same node finds the prefix there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from kvferry.cluster_state.prefix_search import longest
from kvferry.placement.types import NodeKey

MAX_COMPARED = 64
"""Largest number of earlier prompts compared with a new one, latest first."""


class ExpectedPrefix:
    """Blocks of one prompt that a node will have in its cache, until `remove`."""

    __slots__ = ("_rows", "hashes", "node")

    def __init__(self, hashes: Sequence[bytes], node: NodeKey, rows: Rows) -> None:
        self.hashes, self.node, self._rows = hashes, node, rows
        if hashes:
            rows.setdefault(hashes[0], {})[self] = None

    def remove(self) -> None:
        """Remove the prompt: it is computed or given up. May be called repeatedly."""
        row = self._rows.get(self.hashes[0], {}) if self.hashes else {}
        row.pop(self, None)
        if self.hashes and not row:
            self._rows.pop(self.hashes[0], None)


Rows = dict[bytes, dict[ExpectedPrefix, None]]
"""Prompts by their first block, in the order they were sent."""


class InflightPrefixes:
    """All prefixes in flight; adding one costs the same for any length."""

    def __init__(self) -> None:
        self._rows: Rows = {}

    def sent(self, hashes: Sequence[bytes], node: NodeKey) -> ExpectedPrefix:
        """Record that a prompt of these full blocks will be computed on the node."""
        return ExpectedPrefix(hashes, node, self._rows)

    def held(self, hashes: Sequence[bytes], nodes: Mapping[str, int]) -> dict[str, int]:
        """Return the leading blocks that will be held, by node id, for nodes given with their epoch."""
        found: dict[str, int] = {}
        for each in islice(reversed(self._rows.get(hashes[0], {}) if hashes else {}), MAX_COMPARED):
            node_id, epoch = each.node
            if nodes.get(node_id) == epoch:
                shared = _shared(hashes, each.hashes)
                found[node_id] = max(shared, found.get(node_id, 0))
        return found


def _shared(hashes: Sequence[bytes], others: Sequence[bytes]) -> int:
    """Return the number of equal leading blocks by bisection; a block's hash covers all blocks before it."""
    return longest(min(len(hashes), len(others)), lambda place: hashes[place] == others[place])
