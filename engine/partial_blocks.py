"""Registry of partially filled last blocks, for copy-on-write when a request forks from another.

Full blocks are shared as they are; a partial block is copied, since the fork writes behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

TRIED = 8
"""Of the blocks behind one parent, the newest that are compared."""


class Chain(Protocol):
    """A request, as far as its blocks are concerned."""

    token_ids: list[int]
    block_ids: list[int]
    block_size: int

    @property
    def last_start(self) -> int:
        """Position of the first token in the last block."""

    def parent_of(self, start: int) -> bytes:
        """Hash of the block that ends at this position."""


class PartialBlock(NamedTuple):
    """The K/V of the next `length` tokens stand at the beginning of this block."""

    block_id: int
    length: int


class PartialBlocks:
    """A block is known from when the K/V of its tokens is in it until it is taken for another chain: anyone who holds
    it writes only behind them, and freed it stays as it is and is taken after all blocks that are no tails. At most one
    entry a block. enabled: prefixes are reused at all. Owned by the engine thread."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._by_parent: dict[bytes, dict[tuple[int, ...], int]] = {}
        self._places: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._places

    def note(self, request: Chain) -> None:
        """The K/V of all the request's tokens is in its blocks: forks may copy what they share of the last one."""
        if self._enabled:
            start = request.last_start
            block_id = request.block_ids[start // request.block_size]
            self.put(request.parent_of(start), request.token_ids[start:], block_id)

    def put(self, parent: bytes, token_ids: Sequence[int], block_id: int) -> None:
        """The block begins with the K/V of these tokens, which follow the block that hashes to `parent`."""
        self.forget(block_id)
        tokens = tuple(token_ids)
        tails = self._by_parent.setdefault(parent, {})
        older = tails.pop(tokens, None)
        if older is not None:
            del self._places[older]
        tails[tokens] = block_id
        self._places[block_id] = (parent, tokens)

    def match(self, parent: bytes, token_ids: Sequence[int]) -> PartialBlock | None:
        """The block that has just these tokens, or of the newest few the one with most of them in front; None if none
        has any."""
        tails = self._by_parent.get(parent, {})
        known = tails.get(tuple(token_ids))
        if known is not None:
            return PartialBlock(known, len(token_ids))
        newest = [tokens for tokens, _ in zip(reversed(tails), range(TRIED), strict=False)]
        best = max(newest, key=lambda tokens: _shared(tokens, token_ids), default=())
        length = _shared(best, token_ids)
        return PartialBlock(tails[best], length) if length else None

    def forget(self, block_id: int) -> None:
        """The block is taken, to be written anew."""
        parent, tokens = self._places.pop(block_id, (b"", ()))
        tails = self._by_parent.get(parent)
        if tails is not None and tails.get(tokens) == block_id:
            del tails[tokens]
            if not tails:
                del self._by_parent[parent]


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of what both begin with."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
