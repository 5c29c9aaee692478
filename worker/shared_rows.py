"""Rows of host memory, one per KV block, that a host's ranks share to assemble and split blocks; a file that grows."""

from __future__ import annotations

import mmap
import os

import torch


class SharedRows:
    """View of the shared rows in one process.

    All processes grow it by the same counts in the same order. row_bytes: size of a block."""

    def __init__(self, descriptor: int, row_bytes: int) -> None:
        self._descriptor, self._row_bytes, self._end = descriptor, row_bytes, 0
        self._rows: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> torch.Tensor:
        """Return the row as uint8 [row_bytes]."""
        return self._rows[number]

    def grow(self, count: int) -> range:
        """Add rows and return their numbers. Raises OSError.

        The memory is allocated at once, so that later queries of free memory account for it."""
        size = -(-count * self._row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if os.fstat(self._descriptor).st_size < self._end + size:
            os.posix_fallocate(self._descriptor, self._end, size)
        pages = mmap.mmap(self._descriptor, size, offset=self._end)
        self._end += size
        first = len(self._rows)
        self._rows += torch.frombuffer(pages, dtype=torch.uint8)[: count * self._row_bytes].view(count, -1).unbind()
        return range(first, first + count)
