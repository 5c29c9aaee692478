"""One rank's part of whole blocks, copied between its pool and host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.protocol.layout import KVLayout
from kvferry.worker.device_copies import Beside
from kvferry.worker.shared_rows import SharedRows

STAGED = 32 << 20
"""Bytes of parts that are copied to or from the device at once; one part at least."""


@dataclass(frozen=True, slots=True)
class Move:
    """blocks: of every rank's pool; rows: one for each, of whole blocks. out: from the pools."""

    blocks: Sequence[int]
    rows: Sequence[int]
    out: bool


class Segments:
    """Segments of the pool `kv` of `rank` among the ranks that hold the blocks of `layout`.

    Of one thread at a time.

    A part lies in stretches within a row, so the parts of several blocks are laid together on both sides, and cross by
    one copy: from and to memory that is pinned where the device is a GPU. What is taken out of a block was computed by
    steps that have ended, and what is put into one no step has yet: so it waits for no step. On return all is copied.
    """

    def __init__(self, kv: torch.Tensor, layout: KVLayout, rank: int, ranks: int, rows: SharedRows) -> None:
        shared = layout.of_rank(ranks) == layout
        planes, parts = layout.num_layers * layout.planes, 1 if shared else ranks
        self._whole = (planes, parts, layout.block_bytes // (planes * parts))
        self._part, self._brings = 0 if shared else rank, rank == 0 or not shared
        self._own = kv.view(torch.uint8).view(len(kv), planes, -1)
        self._rows, self._beside = rows, Beside(kv.device)
        self._staged = self._own.new_empty(0)

    def move(self, move: Move) -> None:
        """Raises IndexError, on a GPU, too, where a device would be lost by it."""
        if wrong := [block for block in move.blocks if not 0 <= block < len(self._own)]:
            raise IndexError(f"there is no block {wrong[0]}")
        rows = [self._rows[number].view(self._whole)[:, self._part] for number in move.rows]
        most = max(1, STAGED // self._own[0].nbytes)
        for first in range(0, len(rows), most):
            blocks, some = move.blocks[first : first + most], rows[first : first + most]
            if not move.out:
                self._bring(some, blocks)
            elif self._brings:
                self._take(blocks, some)

    def _take(self, blocks: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        staged = self._room(len(blocks))
        with self._beside():
            staged.copy_(self._own[self._index(blocks)], non_blocking=True)
        for part, row in zip(staged, rows, strict=True):
            row.copy_(part)

    def _bring(self, rows: Sequence[torch.Tensor], blocks: Sequence[int]) -> None:
        staged = self._room(len(blocks))
        for part, row in zip(staged, rows, strict=True):
            part.copy_(row)
        with self._beside():
            self._own.index_copy_(0, self._index(blocks), staged.to(self._own.device, non_blocking=True))

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64).to(self._own.device)

    def _room(self, count: int) -> torch.Tensor:
        """Host memory for parts [count, planes, bytes], good until the next call. It grows as it is needed."""
        if len(self._staged) < count:
            shape, pinned = (count, *self._own.shape[1:]), self._own.device.type == "cuda"
            self._staged = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        return self._staged[:count]
