"""Incremental audit of counters: recounts them a little at a time while they are in use."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Hashable, Iterable, Sequence

STRIDE = 64
"""Blocks that are looked at in one go."""


def zeros(count: int) -> Generator[None, None, array[int]]:
    """Yield an array of that many zeros."""
    found, piece = array("i"), array("i", bytes(4 * 16384))
    while len(found) < count:
        found.extend(piece[: count - len(found)])
        yield
    return found


def strides(count: int) -> Iterable[range]:
    """0 … count - 1 in pieces of STRIDE."""
    return (range(start, min(start + STRIDE, count)) for start in range(0, count, STRIDE))


class Holds:
    """Holds per block.

    Pages in `unread` are still to be counted; those read, and those that are new since, are followed as they change."""

    def __init__(self, counts: array[int], pages: Iterable[tuple[str, Hashable]]) -> None:
        self.counts = counts
        self.unread = dict.fromkeys(pages)

    def changed(self, reason: str, owner: Hashable, block_ids: Iterable[int], by: int) -> None:
        """The page gained (by 1) or lost (by -1) these blocks."""
        if (reason, owner) not in self.unread:
            for block_id in block_ids:
                self.counts[block_id] += by


class Children:
    """Findable children per block, of those children whose id is below `upto`."""

    def __init__(self, counts: array[int]) -> None:
        self.counts = counts
        self.upto = 0

    def changed(self, block_id: int, parent: int, by: int) -> None:
        """The block became findable (by 1) below that parent, or was evicted (by -1)."""
        if block_id < self.upto:
            self.counts[parent] += by

    def read(self, piece: range, parents: Sequence[int | None]) -> None:
        """Count the blocks of the piece, the next one, by their parents."""
        for parent in parents:
            if parent is not None:
                self.counts[parent] += 1
        self.upto = piece.stop
