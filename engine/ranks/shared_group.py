"""SharedGroup: sums and gathers of a machine's ranks through shared memory, added in rank order.

Each rank writes its operand, waits until all ranks have written, then reads all operands. Buffers alternate: a rank
writes to a buffer only after a barrier that follows the buffer's last use, and no rank reaches that barrier before it
has read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

NUM_BUFFERS = 2
"""Buffers that alternate."""
ROOM = 1 << 18
"""Numbers per exchange: 1 MiB. Longer operands are exchanged in pieces."""


class SharedGroup:
    """Implements `engine.ranks.group.Group` by sums in rank order, so a number's bits depend on no other number.

    places   float32 [TURNS, ranks, room], shared by all ranks
    barrier  returns once every rank has called it; earlier writes to shared memory are visible afterwards
    """

    apart = False

    def __init__(self, rank: int, places: torch.Tensor, barrier: Callable[[], None]) -> None:
        self.rank, self.ranks = rank, places.shape[1]
        self.written, self._places, self._turn = barrier, places, 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        for piece, parts in self._exchanged(x):
            torch.add(parts[0], parts[1], out=piece)
            for part in parts[2:]:
                piece.add_(part)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(self.ranks, x.numel())
        start = 0
        for piece, parts in self._exchanged(x):
            out[:, start : start + len(piece)] = parts
            start += len(piece)
        return out.view(self.ranks, *x.shape)

    def _exchanged(self, x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each piece [n] of x, and that piece of all ranks [ranks, n]."""
        for piece in torch.split(x.view(-1), self._places.shape[2]):
            self._turn = (self._turn + 1) % NUM_BUFFERS
            parts = self._places[self._turn, :, : len(piece)]
            parts[self.rank] = piece
            self.written()
            yield piece, parts
