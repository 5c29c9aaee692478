"""Copies of one rank's part of whole blocks between its pool and host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.protocol.layout import KVLayout
from kvferry.worker.device_copies import Beside
from kvferry.worker.shared_rows import SharedRows

STAGED = 32 << 20
"""Bytes of block parts copied to or from the device at once; at least one part."""


@dataclass(frozen=True, slots=True)
class Move:
    """Order to copy block parts between all ranks' pools and rows of host memory.

    blocks: ids, the same in every rank's pool. rows: one row of a whole block for each. out: from the pools to the
    rows."""

    blocks: Sequence[int]
    rows: Sequence[int]
    out: bool


class Segments:
    """One rank's parts of the pool's blocks, copied to and from rows of whole blocks.

    kv: the pool of `rank`. layout: of whole blocks. Used by one thread at a time.

    A part is scattered in stretches over its row. The parts of several blocks are therefore gathered on both sides and
    cross in one copy, through pinned memory for a GPU. No copy waits for engine steps: the steps that computed a source
    block have ended, and no step uses a target block yet. All copies are done on return."""

    def __init__(self, kv: torch.Tensor, layout: KVLayout, rank: int, ranks: int, rows: SharedRows) -> None:
        shared = layout.of_rank(ranks) == layout
        planes, parts = layout.num_layers * layout.planes, 1 if shared else ranks
        self._whole = (planes, parts, layout.block_bytes // (planes * parts))
        self._part, self._brings = 0 if shared else rank, rank == 0 or not shared
        self._own = kv.view(torch.uint8).view(len(kv), planes, -1)
        self._rows, self._beside = rows, Beside(kv.device)
        self._staged = self._own.new_empty(0)

    def move(self, move: Move) -> None:
        """Copy the parts. Raises IndexError for a block that does not exist.

        On a GPU an index out of range would otherwise lose the device."""
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
        """Return host memory [count, planes, bytes] for parts, valid until the next call; it grows on demand."""
        if len(self._staged) < count:
            shape, pinned = (count, *self._own.shape[1:]), self._own.device.type == "cuda"
            self._staged = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        return self._staged[:count]
