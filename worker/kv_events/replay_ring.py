"""Ring of the latest batches of KV events, for readers that missed some."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

MAX_BYTES = 64 * 2**20
"""Most bytes of the batches that are kept, whatever their number."""


class ReplayRing:
    """Batches by sequence number, the oldest of which are dropped. steps: most batches."""

    def __init__(self, steps: int, most_bytes: int = MAX_BYTES) -> None:
        self._steps, self._most_bytes = steps, most_bytes
        self._kept: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def put(self, number: int, batch: bytes) -> None:
        """Keep a batch; numbers ascend by one."""
        self._kept.append((number, batch))
        self._bytes += len(batch)
        while len(self._kept) > self._steps or (self._bytes > self._most_bytes and len(self._kept) > 1):
            self._bytes -= len(self._kept.popleft()[1])

    def since(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield the kept batches from this number on."""
        if self._kept:
            skipped = max(0, start - self._kept[0][0])
            for index in range(skipped, len(self._kept)):
                yield self._kept[index]
