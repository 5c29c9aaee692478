"""Collective operations of ranks through shared memory.

A rank lays down what it brings, waits until all have done so, and reads what lies there. Places are used in turn: who
lays something down in one of them was at the meeting behind its last use, to which nobody comes before it has read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

TURNS = 2
ROOM = 1 << 18
"""Numbers that are brought at once: 1 MiB. More go in pieces."""


class SharedGroup:
    """Implements `engine.ranks.group.Group`: sums are added in the order of the ranks, so a number's bits depend on no
    other one.

    places  float32 [TURNS, ranks, room], shared by all
    meet    returns once every rank has called it; what was written to shared memory before is seen after
    """

    apart = False

    def __init__(self, rank: int, places: torch.Tensor, meet: Callable[[], None]) -> None:
        self.rank, self.ranks = rank, places.shape[1]
        self.written, self._places, self._turn = meet, places, 0

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
        """Yield each piece [n] of x, and the same of all ranks [ranks, n]."""
        for piece in torch.split(x.view(-1), self._places.shape[2]):
            self._turn = (self._turn + 1) % TURNS
            parts = self._places[self._turn, :, : len(piece)]
            parts[self.rank] = piece
            self.written()
            yield piece, parts
