"""Send window: bounds the bytes of KV blocks in flight per node, so that queued blocks do not delay other traffic.

UCX processes its queue in order, control messages included. All ships with data to send share one window equally. A
ship that joins waits for at most one window, and a ship whose sends do not end holds only its own share."""

from __future__ import annotations

WINDOW_BYTES = 2 << 20
"""Bytes in flight per node.

Keeps a link of 5 GB/s busy while the link thread pauses for half a millisecond; takes 2 ms on a link of 10 Gbit/s."""
MAX_BLOCKS_IN_FLIGHT = 64
"""Maximum number of blocks in flight, whatever their size, because each block costs the link thread time."""


class SendWindow:
    """Window of bytes in flight, shared by the ships with data to send. Runs on the link thread."""

    def __init__(self, window_bytes: int = WINDOW_BYTES):
        self._bytes = window_bytes
        self._ships: set[object] = set()

    def enter(self, ship: object) -> None:
        """Count the ship among those with data to send."""
        self._ships.add(ship)

    def leave(self, ship: object) -> None:
        """Stop counting the ship: it has nothing to send for now."""
        self._ships.discard(ship)

    def share(self, block_bytes: int) -> int:
        """Return the number of blocks of this size that each ship may have in flight.

        At least 1, and at least 2 for a ship that is alone, so that blocks follow each other without a pause."""
        blocks = min(max(2, self._bytes // max(1, block_bytes)), MAX_BLOCKS_IN_FLIGHT)
        return max(1, blocks // max(1, len(self._ships)))
