"""State of a node's own rows in the block index, used by IndexWriter: rows held, to write and to remove."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

SLICE = 4096
"""Maximum number of rows handled before other tasks of the loop run; a thousand take a fraction of a millisecond."""


class OwnRows:
    """A node's rows. Belongs to one asyncio loop; only one task changes it.

    held   rows of blocks that the node holds
    new    rows of `held` to write; True if the row may already be in the index
    gone   rows to remove from the index
    """

    def __init__(self) -> None:
        self.held: dict[bytes, None] = {}
        self.new: dict[bytes, bool] = {}
        self.gone: dict[bytes, None] = {}

    def add(self, row: bytes) -> None:
        """Record that the node holds the row's block."""
        if row not in self.held:
            self.held[row] = None
            self.new[row] = self.gone.pop(row, self) is not self

    def remove(self, row: bytes) -> None:
        """Record that the node dropped the row's block."""
        if row in self.held:
            del self.held[row]
            if self.new.pop(row, True):
                self.gone[row] = None

    async def compare(self, snapshot: Iterable[bytes]) -> None:
        """Make the held rows equal to the snapshot."""
        present: dict[bytes, None] = {}
        for part in slices(snapshot):
            present.update(dict.fromkeys(part))
            await asyncio.sleep(0)
        for part in slices(list(self.held)):
            for row in part:
                if row not in present:
                    self.remove(row)
            await asyncio.sleep(0)
        for part in slices(present):
            for row in part:
                self.add(row)
            await asyncio.sleep(0)

    async def rewrite(self) -> None:
        """Mark all held rows as to be written."""
        new: dict[bytes, bool] = {}
        for part in slices(list(self.held)):
            new.update((row, self.new.get(row, True)) for row in part)
            await asyncio.sleep(0)
        self.new = new


def slices(hashes: Iterable[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield the hashes in parts of SLICE."""
    rest = iter(hashes)
    while part := list(islice(rest, SLICE)):
        yield part
