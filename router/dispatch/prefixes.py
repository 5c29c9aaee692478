"""Prefixes: finds the nodes that hold a prompt's prefix, in the block index or in this router's memory."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvferry.placement.types import NodeKey
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.nodes.checkpoints import Checkpoints

log = logging.getLogger(__name__)

MAX_REMEMBERED = 1 << 16
"""Largest number of blocks remembered."""
MAX_NODES = 8
"""Largest number of nodes remembered per block."""
LOG_INTERVAL_S = 10.0
"""Shortest time between two log lines about the index, in seconds."""
FALLBACK_S = 5.0
"""Time after an index outage in which the router also uses its own memory, in seconds.

Index rows may be lost until the nodes have written them again."""


class BlockLookup(Protocol):
    """Part of the block index's interface that the router uses."""

    async def longest_prefix(self, hashes: Sequence[bytes], nodes: Mapping[str, int]) -> dict[str, int]:
        """Return the leading blocks held, by node id, for nodes given with their live epoch."""

    async def holders(self, rows: Sequence[bytes], nodes: Mapping[str, int]) -> list[frozenset[str]]:
        """Return, for each row, which nodes have it, of those given with their live epoch."""


class Remembered:
    """Nodes that recently computed a block for this router, latest first.

    Holds at most `max_blocks` blocks; the older half is dropped at once. Evictions on the nodes are not tracked: a node
    computes an evicted block again."""

    def __init__(self, max_blocks: int = MAX_REMEMBERED) -> None:
        self._half = max_blocks // 2
        self._recent: dict[bytes, tuple[NodeKey, ...]] = {}
        self._old: dict[bytes, tuple[NodeKey, ...]] = {}

    def __len__(self) -> int:
        return len(self._recent) + len(self._old)

    def note(self, hashes: Sequence[bytes], nodes: tuple[NodeKey, ...]) -> None:
        """Record that these nodes hold a prompt of these blocks."""
        blocks = hashes[: self._half]
        if len(self._recent) + len(set(blocks).difference(self._recent)) > self._half:
            self._old, self._recent = self._recent, {}
        before: tuple[NodeKey, ...] = ()
        for place, block in enumerate(blocks):
            known = self._known(block)
            if not known:
                self._recent.update(dict.fromkeys(blocks[place:], nodes))
                break
            if known is not before:  # neighbouring blocks share one tuple
                before, merged = known, (*nodes, *(node for node in known if node not in nodes))[:MAX_NODES]
            self._recent[block] = merged

    def held(self, hashes: Sequence[bytes], nodes: Mapping[str, int]) -> dict[str, int]:
        """Return the leading blocks held, by node id, for nodes given with their epoch.

        A node that holds a block holds all blocks before it."""
        found: dict[str, int] = {}
        for length in range(len(hashes), 0, -1):
            for node_id, epoch in self._known(hashes[length - 1]):
                if nodes.get(node_id) == epoch:
                    found.setdefault(node_id, length)
            if len(found) == len(nodes):
                break
        return found

    def _known(self, block: bytes) -> tuple[NodeKey, ...]:
        return self._recent.get(block) or self._old.get(block) or ()


class Prefixes:
    """Prefix lookup in the block index within a time limit, with the router's own memory as fallback."""

    def __init__(
        self,
        lookup: BlockLookup,
        metrics: RouterMetrics,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookup, self._metrics, self._limit_s, self._clock = lookup, metrics, limit_s, clock
        self._remembered = Remembered()
        self._was_up, self._logged_at = True, -math.inf
        self._fallback_until = -math.inf
        self.note = self._remembered.note

    async def held(
        self, hashes: Sequence[bytes], nodes: Mapping[str, int], up: bool = True, states: Checkpoints | None = None
    ) -> dict[str, int]:
        """Return the leading blocks that can be reused, by node id, for nodes given with their epoch.

        Skips the index if not `up`. states: of a model with recurrent layers, whose prefixes are reused only up to a
        checkpoint; it costs one more lookup."""
        found = await self._indexed(hashes, nodes, states) if up else None
        now = self._clock()
        if found is None:
            self._fallback_until = now + FALLBACK_S
        held = found or {}
        if now < self._fallback_until:
            for node_id, length in self._remembered.held(hashes, nodes).items():
                held[node_id] = max(length, held.get(node_id, 0))
        return held

    async def _indexed(
        self, hashes: Sequence[bytes], nodes: Mapping[str, int], states: Checkpoints | None
    ) -> dict[str, int] | None:
        """Ask the index; None if it does not answer in time."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._limit_s):
                held = await self._lookup.longest_prefix(hashes, nodes)
                if states is not None and held:
                    places = states.places(set(held.values()))
                    rows = [states.row(hashes, place) for place in places]
                    holders = await self._lookup.holders(rows, {name: nodes[name] for name in held})
                    held = states.covered(held, places, holders)
        except Exception as error:
            self._log_change(False, f"block index does not answer, placing by load and remembered prefixes: {error!r}")
            return None
        finally:
            self._metrics.index_seconds.observe(time.perf_counter() - began)
        self._log_change(True, "block index answers again")
        return held

    def _log_change(self, answers: bool, text: str) -> None:
        """Log a change of the index's state, at most once in LOG_INTERVAL_S, since it may change with each request."""
        now = self._clock()
        if answers != self._was_up and now >= self._logged_at + LOG_INTERVAL_S:
            log.log(logging.INFO if answers else logging.WARNING, text)
            self._was_up, self._logged_at = answers, now
