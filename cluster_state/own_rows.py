"""A node's own rows of the block index: those written, those to write and those to remove."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

SLICE = 4096
"""Rows that are looked at before others on the loop have their turn: a fraction of a millisecond for each thousand."""


class OwnRows:
    """Every row of ours is in `held` or `gone`; `new` maps those of `held` that are to be written to whether they may
    be there already. On the asyncio loop; one task changes it."""

    def __init__(self) -> None:
        self.held: dict[bytes, None] = {}
        self.new: dict[bytes, bool] = {}
        self.gone: dict[bytes, None] = {}

    def add(self, row: bytes) -> None:
        if row not in self.held:
            self.held[row] = None
            self.new[row] = self.gone.pop(row, self) is not self

    def remove(self, row: bytes) -> None:
        if row in self.held:
            del self.held[row]
            if self.new.pop(row, True):
                self.gone[row] = None

    async def compare(self, snapshot: Iterable[bytes]) -> None:
        """These are held now, and no others."""
        there: dict[bytes, None] = {}
        for part in slices(snapshot):
            there.update(dict.fromkeys(part))
            await asyncio.sleep(0)
        for part in slices(list(self.held)):
            for row in part:
                if row not in there:
                    self.remove(row)
            await asyncio.sleep(0)
        for part in slices(there):
            for row in part:
                self.add(row)
            await asyncio.sleep(0)

    async def rewrite(self) -> None:
        """All are to be written again."""
        new: dict[bytes, bool] = {}
        for part in slices(list(self.held)):
            new.update((row, self.new.get(row, True)) for row in part)
            await asyncio.sleep(0)
        self.new = new


def slices(hashes: Iterable[bytes]) -> Iterator[Sequence[bytes]]:
    """SLICE of them at once."""
    rest = iter(hashes)
    while part := list(islice(rest, SLICE)):
        yield part
