"""One rank's part of blocks: how it gets from a pool of its own into whole blocks in the host's memory, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from node.device_copies import Beside
from node.rows import Rows
from protocol.layout import KVLayout


@dataclass(frozen=True, slots=True)
class Move:
    """blocks: of every rank's pool; rows: one for each, of whole blocks. out: from the pools."""

    blocks: Sequence[int]
    rows: Sequence[int]
    out: bool


class Segments:
    """Of the pool `kv` of `rank`, one of so many that have the blocks of `layout` together. Of one thread at a time.

    What is taken out of a block was computed by steps that have ended, and what is put into one no step has yet: so it
    waits for no step. On return all is copied.
    """

    def __init__(self, kv: torch.Tensor, layout: KVLayout, rank: int, ranks: int, rows: Rows) -> None:
        shared = layout.of_rank(ranks) == layout
        planes, parts = layout.num_layers * layout.planes, 1 if shared else ranks
        self._whole = (planes, parts, layout.block_bytes // (planes * parts))
        self._part, self._brings = 0 if shared else rank, rank == 0 or not shared
        self._own = kv.view(torch.uint8).view(len(kv), planes, -1)
        self._rows, self._beside = rows, Beside(kv.device)

    def move(self, move: Move) -> None:
        with self._beside():
            for block_id, number in zip(move.blocks, move.rows, strict=True):
                own, whole = self._own[block_id], self._rows[number].view(self._whole)[:, self._part]
                if not move.out:
                    own.copy_(whole)
                elif self._brings:
                    whole.copy_(own)
