"""Host memory with one row per block that all ranks share, in a file that only grows."""

from __future__ import annotations

import mmap
import os

import torch


class SharedRows:
    """One process's view. All processes grow it by the same counts, in the same order. row_bytes: of a block."""

    def __init__(self, descriptor: int, row_bytes: int) -> None:
        self._descriptor, self._row_bytes, self._end = descriptor, row_bytes, 0
        self._rows: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> torch.Tensor:
        """uint8 [row_bytes]."""
        return self._rows[number]

    def grow(self, count: int) -> range:
        """The numbers of new rows.

        Their memory is taken at once, so anyone who asks next how much is left is told the truth. Raises OSError."""
        size = -(-count * self._row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if os.fstat(self._descriptor).st_size < self._end + size:
            os.posix_fallocate(self._descriptor, self._end, size)
        pages = mmap.mmap(self._descriptor, size, offset=self._end)
        self._end += size
        first = len(self._rows)
        self._rows += torch.frombuffer(pages, dtype=torch.uint8)[: count * self._row_bytes].view(count, -1).unbind()
        return range(first, first + count)
