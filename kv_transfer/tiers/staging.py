"""Staging buffers in host memory for blocks on their way between a device and a tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

STAGED = 64 << 20
"""Bytes of the host's memory that one way takes, where a block is no larger."""


class Copies(Protocol):
    """Between the blocks of a pool on a device and the memory of the host.

    From any thread. A call returns once all is copied, and holds up nothing that the device computes; what it reads or
    writes, no step under way may write."""

    def room(self, blocks: int) -> Sequence[Any]:
        """Writable bytes of the host, as long as a block each, which copies are quick with. Raises MemoryError."""

    def to_host(self, blocks: Sequence[Any], rows: Sequence[Any]) -> None: ...

    def to_device(self, rows: Sequence[Any], blocks: Sequence[Any]) -> None: ...


class Staging:
    """Belongs to one thread. Without copies, blocks are bytes of the host themselves and nothing is copied.

    most   blocks at once
    """

    def __init__(self, copies: Copies | None, most: int) -> None:
        self.most, self._copies = most, copies
        self._rows: Sequence[Any] = copies.room(most) if copies else ()

    def brought(self, blocks: Sequence[Any]) -> Sequence[Any]:
        """Return these blocks as host bytes, valid until the next call."""
        if self._copies is None:
            return blocks
        rows = self._rows[: len(blocks)]
        self._copies.to_host(blocks, rows)
        return rows

    def to_fill(self, blocks: Sequence[Any]) -> Sequence[Any]:
        """Bytes of the host into which is to be written what these blocks are to hold; then `filled` is called."""
        return blocks if self._copies is None else self._rows[: len(blocks)]

    def filled(self, blocks: Sequence[Any]) -> None:
        if self._copies is not None:
            self._copies.to_device(self._rows[: len(blocks)], blocks)


def at_once(block_bytes: int, most: int) -> int:
    """Blocks that one way takes at once: `most` of them, or what STAGED has room for."""
    return max(1, min(most, STAGED // block_bytes))
