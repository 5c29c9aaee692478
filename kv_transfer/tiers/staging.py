"""Staging buffers in host memory, through which a tier copies blocks from and to a device's pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

STAGED = 64 << 20
"""Size of the host memory for each direction in bytes, unless a single block is larger."""


class Copies(Protocol):
    """Copies blocks between a device's pool and host memory. Thread-safe.

    A call returns when the copy is complete and does not delay computation on the device. No running step may write the
    blocks that it reads or writes."""

    def room(self, blocks: int) -> Sequence[Any]:
        """Allocate writable host buffers of one block each, suited to fast copies. Raises MemoryError."""

    def to_host(self, blocks: Sequence[Any], rows: Sequence[Any]) -> None:
        """Copy blocks of the device into rows of host memory."""
        ...

    def to_device(self, rows: Sequence[Any], blocks: Sequence[Any]) -> None:
        """Copy rows of host memory into blocks of the device."""
        ...


class Staging:
    """Staging buffers of one thread. Without `copies`, blocks are in host memory already and nothing is copied.

    most   maximum number of blocks at once
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
        """Return host buffers for the new content of these blocks; call `filled` after writing them."""
        return blocks if self._copies is None else self._rows[: len(blocks)]

    def filled(self, blocks: Sequence[Any]) -> None:
        """Copy the buffers of `to_fill` into their blocks."""
        if self._copies is not None:
            self._copies.to_device(self._rows[: len(blocks)], blocks)


def at_once(block_bytes: int, most: int) -> int:
    """Return the number of blocks staged at once: `most`, or fewer if they exceed STAGED."""
    return max(1, min(most, STAGED // block_bytes))
