"""A pool on a device that is not there: its blocks are reached by copies alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

SIZE = 4096


class Device:
    """Implements kv_transfer.tiers.staging.Copies. Blocks are numbers, which are no bytes; host memory for copies is
    bounded, and what was not given by `room` is not copied.

    copying   called at each copy, before any byte moves
    """

    def __init__(self, blocks: int, rows: int = 1 << 20) -> None:
        self.memory = np.zeros((blocks, SIZE), np.uint8)
        self.rows_left = rows
        self.most_at_once = 0
        self.copying: Callable[[], None] = lambda: None
        self._known: set[int] = set()

    def holding(self, *numbers: int) -> list[int]:
        """Blocks that hold their own numbers."""
        for number in numbers:
            self.memory[number] = number
        return list(numbers)

    def room(self, blocks: int) -> Sequence[np.ndarray]:
        if blocks > self.rows_left:
            raise MemoryError(f"{blocks} rows")
        self.rows_left -= blocks
        rows = list(np.zeros((blocks, SIZE), np.uint8))
        self._known.update(map(_address, rows))
        return rows

    def to_host(self, blocks: Sequence[Any], rows: Sequence[np.ndarray]) -> None:
        self._begin(blocks, rows)
        for block, row in zip(blocks, rows, strict=True):
            row[:] = self.memory[block]

    def to_device(self, rows: Sequence[np.ndarray], blocks: Sequence[Any]) -> None:
        self._begin(blocks, rows)
        for block, row in zip(blocks, rows, strict=True):
            self.memory[block] = row

    def _begin(self, blocks: Sequence[Any], rows: Sequence[np.ndarray]) -> None:
        assert all(type(block) is int for block in blocks)
        assert self._known.issuperset(map(_address, rows)), "memory that copies are not quick with"
        self.most_at_once = max(self.most_at_once, len(blocks))
        self.copying()


def _address(row: np.ndarray) -> int:
    return int(row.__array_interface__["data"][0])
