"""Counts of the block pool's audit: holds and cached children per block, counted piecewise while the pool is in use."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Hashable, Iterable, Sequence

STRIDE = 64
"""Blocks counted at once."""


def zeros(count: int) -> Generator[None, None, array[int]]:
    """Return an array of `count` zeros, filled piecewise."""
    found, piece = array("i"), array("i", bytes(4 * 16384))
    while len(found) < count:
        found.extend(piece[: count - len(found)])
        yield
    return found


def strides(count: int) -> Iterable[range]:
    """Yield 0 … count - 1 in pieces of STRIDE."""
    return (range(start, min(start + STRIDE, count)) for start in range(0, count, STRIDE))


class HoldCounts:
    """Recount of the holds per block.

    Pages in `unread` are not counted yet. Counted pages, and pages added since, follow changes."""

    def __init__(self, counts: array[int], pages: Iterable[tuple[str, Hashable]]) -> None:
        self.counts = counts
        self.unread = dict.fromkeys(pages)

    def changed(self, reason: str, owner: Hashable, block_ids: Iterable[int], by: int) -> None:
        """Note that the page gained (by 1) or lost (by -1) these blocks."""
        if (reason, owner) not in self.unread:
            for block_id in block_ids:
                self.counts[block_id] += by


class ChildCounts:
    """Recount of each block's findable children with an id below `upto`."""

    def __init__(self, counts: array[int]) -> None:
        self.counts = counts
        self.upto = 0

    def changed(self, block_id: int, parent: int, by: int) -> None:
        """Note that the block became findable (by 1) below that parent, or was evicted (by -1)."""
        if block_id < self.upto:
            self.counts[parent] += by

    def read(self, piece: range, parents: Sequence[int | None]) -> None:
        """Count the next piece of blocks by their parents."""
        for parent in parents:
            if parent is not None:
                self.counts[parent] += 1
        self.upto = piece.stop
