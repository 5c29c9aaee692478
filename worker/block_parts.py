"""Layout of one rank's part of each KV block, and copies of parts between the rank's pool and host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvferry.protocol.layout import KVLayout
from kvferry.worker.device_copies import CopyStream
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


@dataclass(frozen=True, slots=True)
class RankPart:
    """Place of one rank's part within a whole block.

    planes: number of stretches of the part, one for each layer's K or V. parts: number of ranks that share a plane; 1
    if all ranks have the same bytes. index: index of this rank among them. plane_bytes: length of a stretch. brings:
    whether this rank provides the bytes of a block that is read."""

    planes: int
    parts: int
    index: int
    plane_bytes: int
    brings: bool

    @staticmethod
    def of(layout: KVLayout, rank: int, ranks: int) -> RankPart:
        """Return the part of a rank in blocks of this layout."""
        shared = layout.of_rank(ranks) == layout
        planes, parts = layout.num_layers * layout.planes, 1 if shared else ranks
        plane_bytes = layout.block_bytes // (planes * parts)
        return RankPart(planes, parts, 0 if shared else rank, plane_bytes, brings=rank == 0 or not shared)

    def within(self, row: torch.Tensor) -> torch.Tensor:
        """Return the part of a row of a whole block, as a view uint8 [planes, plane_bytes]."""
        return row.view(self.planes, self.parts, self.plane_bytes)[:, self.index]

    def runs(self, count: int) -> Iterator[slice]:
        """Divide `count` blocks into runs whose parts are copied at once."""
        most = max(1, STAGED // (self.planes * self.plane_bytes))
        return (slice(first, min(first + most, count)) for first in range(0, count, most))


class Segments:
    """One rank's parts of the pool's blocks, copied to and from host memory. Used by one thread at a time.

    kv: the pool of `rank`. layout: layout of whole blocks.

    A part is scattered in stretches over its row. The parts of several blocks are therefore gathered on both sides and
    moved by one copy, through pinned memory for a GPU. No copy waits for engine steps: the steps that computed a source
    block have ended, and no step uses a target block yet. All copies are done on return."""

    def __init__(self, kv: torch.Tensor, layout: KVLayout, rank: int, ranks: int) -> None:
        self.part = RankPart.of(layout, rank, ranks)
        self._own = kv.view(torch.uint8).view(len(kv), self.part.planes, -1)
        self._copy_stream = CopyStream(kv.device)
        self._staged = self._own.new_empty(0)

    def move(self, move: Move, rows: SharedRows) -> None:
        """Copy the parts between the pool and rows. Raises IndexError for a block that does not exist."""
        self.check(move)
        views = [self.part.within(rows[number]) for number in move.rows]
        for run in self.part.runs(len(views)):
            if not move.out:
                self.bring(torch.stack(views[run], out=self.room(len(views[run]))), move.blocks[run])
            elif self.part.brings:
                for part, view in zip(self.take(move.blocks[run]), views[run], strict=True):
                    view.copy_(part)

    def check(self, move: Move) -> None:
        """Raise IndexError for a block that does not exist.

        On a GPU an index out of range would otherwise lose the device."""
        if wrong := [block for block in move.blocks if not 0 <= block < len(self._own)]:
            raise IndexError(f"there is no block {wrong[0]}")

    def take(self, blocks: Sequence[int]) -> torch.Tensor:
        """Return the blocks' parts in host memory, uint8 [count, planes, plane_bytes], valid until the next call."""
        staged = self.room(len(blocks))
        with self._copy_stream():
            staged.copy_(self._own[self._index(blocks)], non_blocking=True)
        return staged

    def bring(self, staged: torch.Tensor, blocks: Sequence[int]) -> None:
        """Copy parts in host memory, as `take` returns them, into the blocks."""
        with self._copy_stream():
            self._own.index_copy_(0, self._index(blocks), staged.to(self._own.device, non_blocking=True))

    def room(self, count: int) -> torch.Tensor:
        """Return host memory [count, planes, plane_bytes] for parts, valid until the next call; it grows on demand."""
        if len(self._staged) < count:
            shape, pinned = (count, *self._own.shape[1:]), self._own.device.type == "cuda"
            self._staged = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        return self._staged[:count]

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64).to(self._own.device)
