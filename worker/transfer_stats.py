"""Statistics of a node's recent transfers of replicas and migrated streams to other nodes, announced in its lease."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvferry.kv_transfer.ports import ShipStats
from kvferry.protocol.lease import Sent

WINDOW_S = 20.0
"""Length of the statistics window, in seconds."""
MAX_KEPT, MAX_ROWS = 512, 8
"""Maximum number of transfers that are kept, and of rows that the lease announces."""


class _Transfer(NamedTuple):
    at: float
    kind: str
    node_id: str
    blocks: int
    size: int


class TransferStats:
    """Statistics of transfers to other nodes; thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._transfers: deque[_Transfer] = deque(maxlen=MAX_KEPT)

    def note(self, kind: str, node_id: str, stats: ShipStats) -> None:
        """Record a successful transfer to a node. kind: copy or move."""
        with self._lock:
            self._transfers.append(_Transfer(self._clock(), kind, node_id, stats.blocks, stats.bytes))

    def rows(self) -> tuple[Sent, ...]:
        """Return the transfers of the last WINDOW_S seconds by kind and node, the most bytes first."""
        since = self._clock() - WINDOW_S
        with self._lock:
            while self._transfers and self._transfers[0].at < since:
                self._transfers.popleft()
            found: dict[tuple[str, str], list[_Transfer]] = {}
            for each in self._transfers:
                found.setdefault((each.kind, each.node_id), []).append(each)
        rows = [
            Sent(kind, node_id, len(all_), sum(t.blocks for t in all_), sum(t.size for t in all_) / WINDOW_S)
            for (kind, node_id), all_ in found.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.bytes_per_s)[:MAX_ROWS])
