"""Checkpoints: index rows that show saved recurrent states of a prompt, and how much of it nodes can then reuse."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvferry.protocol.hashing import state_hash
from kvferry.protocol.index_rows import row_at

NEAR = 8
"""Number of last blocks of a held prefix at each of which a checkpoint is looked up."""
MAX_STRIDES = 64
"""Maximum number of regular checkpoints that are looked up, the last ones of a prompt."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """How a group of nodes keeps recurrent states: blocks of a checkpoint, and blocks between regular ones."""

    num_blocks: int
    stride: int

    def places(self, lengths: Collection[int]) -> list[int]:
        """Return where to look up checkpoints, in leading blocks, given how many blocks of a prompt nodes hold.

        Nodes keep one where prompts end or diverge, so near the end of a held prefix, and at each stride."""
        longest = max(lengths, default=0)
        places = {place for length in lengths for place in range(max(1, length - NEAR + 1), length + 1)}
        last = longest // self.stride
        places.update(self.stride * multiple for multiple in range(max(1, last - MAX_STRIDES + 1), last + 1))
        return sorted(places)

    def row(self, hashes: Sequence[bytes], count: int) -> bytes:
        """Return the index row of the last block of the checkpoint after `count` blocks; it shows that all exist."""

        def chain(position: int) -> bytes:
            return hashes[position] if position < count else state_hash(hashes[count - 1], position - count)

        return row_at(chain, count + self.num_blocks - 1)

    def covered(
        self, held: Mapping[str, int], places: Sequence[int], holders: Sequence[Collection[str]]
    ) -> dict[str, int]:
        """Return how many leading blocks each node can reuse, given the nodes that have a checkpoint at each place."""
        found: dict[str, int] = {}
        for place, names in zip(places, holders, strict=True):
            found.update({name: place for name in names if place <= held.get(name, 0)})
        return found
