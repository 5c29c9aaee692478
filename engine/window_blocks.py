"""A request's pages (blocks of sliding-window layers for its last tokens), and a batch's block tables of pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class WindowBlocks:
    """Pages of a request: consecutive ones from `first` on, each with one block of every group of layers.

    Page i holds the K/V of the tokens of block i of the request's chain. registered: pages before it are findable, or
    lie behind the window. groups: ids of the pages' blocks, by group."""

    __slots__ = ("first", "groups", "registered")

    def __init__(self, first: int, groups: int, block_ids: Sequence[int] = ()) -> None:
        self.first = self.registered = first
        self.groups: tuple[list[int], ...] = tuple([] for _ in range(groups))
        self.append(block_ids)

    @property
    def end(self) -> int:
        """Return the number of the page behind the last one."""
        return self.first + len(self.groups[0])

    def append(self, block_ids: Sequence[int]) -> None:
        """Add whole pages at the end, block by block."""
        for group, ids in enumerate(self.groups):
            ids.extend(block_ids[group :: len(self.groups)])

    def ids(self, begin: int = 0, end: int | None = None) -> list[int]:
        """Return the blocks of the pages [begin, end), page by page; of all by default."""
        begin, end = max(begin, self.first), self.end if end is None else end
        pages = zip(*(ids[begin - self.first : max(0, end - self.first)] for ids in self.groups), strict=True)
        return [block_id for page in pages for block_id in page]

    def drop(self, until: int) -> list[int]:
        """Remove the pages before `until`; return their blocks."""
        released = self.ids(end=until)
        count = max(0, min(until, self.end) - self.first)
        for ids in self.groups:
            del ids[:count]
        self.first += count
        self.registered = max(self.registered, self.first)
        return released


class WindowTables:
    """Tables int32 [groups, rows, width] and slots int64 [groups, tokens] of a batch.

    tokens: of the batch; 0: one for each row. Entries before a row's pages name any block: no kernel uses them."""

    def __init__(self, groups: int, rows: int, width: int, block_size: int, tokens: int = 0) -> None:
        self._block_size = block_size
        self._tables = np.zeros((groups, rows, width), dtype=np.int32)
        self._slots = np.empty((groups, tokens or rows), dtype=np.int64)

    @property
    def arrays(self) -> list[np.ndarray]:
        """Return slots and tables: see `BatchPlan.with_windows`."""
        return [self._slots, self._tables]

    def read(self, row: int, pages: WindowBlocks | None) -> None:
        """Read the blocks of a row's pages."""
        assert pages is not None, "a request without pages of its windows"
        self._tables[:, row, pages.first : pages.end] = pages.groups

    def write(self, row: int, position: int) -> None:
        """Set the slots of a row's only token."""
        block, offset = divmod(position, self._block_size)
        self._slots[:, row] = self._tables[:, row, block] * self._block_size + offset

    def write_all(self, sequence: np.ndarray, positions: np.ndarray) -> None:
        """Set the slots of all tokens, given the row and position of each."""
        blocks = self._tables[:, sequence, positions // self._block_size].astype(np.int64)
        self._slots[:] = blocks * self._block_size + positions % self._block_size
