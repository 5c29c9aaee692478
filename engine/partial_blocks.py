"""Registry of partially filled KV blocks, which forks of a request copy because they write after them.

Full blocks are shared as they are; a partial block is copied, because the fork writes after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

TRIED = 8
"""Newest blocks of one parent that are compared."""


class Chain(Protocol):
    """View of a request's tokens and blocks."""

    token_ids: list[int]
    block_ids: list[int]
    block_size: int

    @property
    def last_start(self) -> int:
        """Return the position of the first token in the last block."""

    def parent_of(self, start: int) -> bytes:
        """Return the hash of the block that ends at this position."""


class PartialBlock(NamedTuple):
    """Block that begins with the K/V of the next `length` tokens."""

    block_id: int
    length: int


class PartialBlocks:
    """Registry of partial blocks, at most one entry per block. Owned by the engine thread.

    A block is known from when it holds its tokens' K/V until it is allocated again. Its holders write only after those
    tokens, and a freed block keeps them and is allocated last. enabled: prefixes are reused at all."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._by_parent: dict[bytes, dict[tuple[int, ...], int]] = {}
        self._places: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._places

    def note(self, request: Chain) -> None:
        """Note that the K/V of all the request's tokens is in its blocks, so forks may copy from the last one."""
        if self._enabled:
            start = request.last_start
            block_id = request.block_ids[start // request.block_size]
            self.put(request.parent_of(start), request.token_ids[start:], block_id)

    def put(self, parent: bytes, token_ids: Sequence[int], block_id: int) -> None:
        """Note that the block begins with the K/V of these tokens, which follow the block that hashes to `parent`."""
        self.forget(block_id)
        tokens = tuple(token_ids)
        tails = self._by_parent.setdefault(parent, {})
        older = tails.pop(tokens, None)
        if older is not None:
            del self._places[older]
        tails[tokens] = block_id
        self._places[block_id] = (parent, tokens)

    def match(self, parent: bytes, token_ids: Sequence[int]) -> PartialBlock | None:
        """Return the block with exactly these tokens, or one that shares leading tokens, or None.

        Among the TRIED newest blocks, the one that shares most is returned."""
        tails = self._by_parent.get(parent, {})
        known = tails.get(tuple(token_ids))
        if known is not None:
            return PartialBlock(known, len(token_ids))
        newest = [tokens for tokens, _ in zip(reversed(tails), range(TRIED), strict=False)]
        best = max(newest, key=lambda tokens: _shared(tokens, token_ids), default=())
        length = _shared(best, token_ids)
        return PartialBlock(tails[best], length) if length else None

    def forget(self, block_id: int) -> None:
        """Forget the block: it is allocated and will be overwritten."""
        parent, tokens = self._places.pop(block_id, (b"", ()))
        tails = self._by_parent.get(parent)
        if tails is not None and tails.get(tokens) == block_id:
            del tails[tokens]
            if not tails:
                del self._by_parent[parent]


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
