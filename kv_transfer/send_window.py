"""Bound on blocks in flight per node.

Operations in UCX's queues cannot be overtaken, by control messages either.

The ships that have something to send share a window equally, so each that joins waits for one window at most, and one
whose sends do not end holds its own share and nobody else's turn.
"""

from __future__ import annotations

WINDOW_BYTES = 2 << 20
"""Keeps a link of 5 GB/s busy while its thread is away for half a millisecond, and is 2 ms of one of 10 Gbit/s."""
MOST_BLOCKS = 64
"""However small they are: each costs the link thread time of its own."""


class SendWindow:
    """Runs on the link thread."""

    def __init__(self, window_bytes: int = WINDOW_BYTES):
        self._bytes = window_bytes
        self._ships: set[object] = set()

    def enter(self, ship: object) -> None:
        """It has something to send."""
        self._ships.add(ship)

    def leave(self, ship: object) -> None:
        """It has not, any more or for now."""
        self._ships.discard(ship)

    def share(self, block_bytes: int) -> int:
        """Blocks of this size that each ship may have on its way: at least one, and two of a ship that is alone, so
        that one follows the other without a pause."""
        blocks = min(max(2, self._bytes // max(1, block_bytes)), MOST_BLOCKS)
        return max(1, blocks // max(1, len(self._ships)))
