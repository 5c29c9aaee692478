"""CapacitySummary: running total of a model's node capacities, which rejects requests when all nodes are full.

A request changes its nodes' reservations six times and reads the summary once, so updates wait for the next read."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvferry.placement.rejections import full, no_nodes
from kvferry.placement.types import NodeKey, NodeView
from kvferry.protocol.errors import KvferryError


class NodeCapacity(NamedTuple):
    """Contribution of one node to the CapacitySummary.

    prefills       1 for a ready prefill node
    decodes        1 for a ready decode node
    spare_blocks   blocks that may still be requested from it
    excess_blocks  blocks requested beyond its limit
    freed_per_s    blocks that it frees per second
    """

    prefills: int = 0
    decodes: int = 0
    spare_blocks: int = 0
    excess_blocks: int = 0
    freed_per_s: float = 0.0


class CapacitySummary:
    """Sum of the nodes' capacities, with which a request can be rejected without a scan of the nodes.

    total   sum of the nodes' capacities
    views   reachable nodes as placement sees them
    placed  number of reservations ever made
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.placed = 0
        self._total = NodeCapacity()
        self._views: dict[NodeKey, NodeView] = {}
        self._pending: dict[Callable[[], None], None] = {}

    @property
    def total(self) -> NodeCapacity:
        """Return the sum of the nodes' capacities, after pending updates."""
        self.update()
        return self._total

    @property
    def views(self) -> dict[NodeKey, NodeView]:
        """Return the reachable nodes, after pending updates."""
        self.update()
        return self._views

    def schedule(self, update: Callable[[], None]) -> None:
        """Schedule `update` of a changed node; it runs before the next read and reports through `change`."""
        self._pending[update] = None

    def update(self) -> None:
        """Apply the pending updates."""
        pending, self._pending = self._pending, {}
        for update in pending:
            update()

    def change(self, key: NodeKey, view: NodeView | None, before: NodeCapacity, after: NodeCapacity) -> None:
        """Change one node: its view, or None to remove it, and its capacity."""
        if view is not None:
            self._views[key] = view
        else:
            self._views.pop(key, None)
        if before != after:
            own = self._total
            self._total = NodeCapacity(
                own.prefills + after.prefills - before.prefills,
                own.decodes + after.decodes - before.decodes,
                own.spare_blocks + after.spare_blocks - before.spare_blocks,
                own.excess_blocks + after.excess_blocks - before.excess_blocks,
                own.freed_per_s + after.freed_per_s - before.freed_per_s,
            )

    def refusal(self) -> KvferryError | None:
        """Return the reason why no request that needs a decode node can be placed; None if one may be."""
        total = self.total
        if not total.decodes:
            return no_nodes(self.model)
        return None if total.spare_blocks else full(total.excess_blocks / total.freed_per_s)
