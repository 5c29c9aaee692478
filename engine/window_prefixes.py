"""WindowPrefixes: which cached prefixes can be reused, given the pages of their last window, and chains with pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.request import Request
from kvferry.protocol.hashing import state_hash, state_hashes
from kvferry.protocol.layer_groups import LayerGroups
from kvferry.protocol.layout import blocks_for


class WindowPrefixes:
    """Prefixes in one engine's pool; implements `engine.auxiliary_blocks.AuxiliaryPrefixes`.

    num_blocks: blocks of a page. reserved: a migration sends pages from where they are, and copies none."""

    reserved = 0

    def __init__(self, pool: BlockPool, groups: LayerGroups, block_size: int) -> None:
        self._pool, self.num_blocks = pool, groups.count
        self._before = groups.max_pages(block_size) - 1

    @property
    def max_sent_blocks(self) -> int:
        """Return the maximum number of page blocks that go with a chain to another node."""
        return self._before * self.num_blocks

    def covered(self, hashes: Sequence[bytes], found: Callable[[bytes], bool] | None = None) -> int:
        """Return how many of these leading blocks, all of them found, can be reused: those behind a whole window.

        found: whether a page is, by its last block's hash; None: it is in the pool."""
        found = found or self._here
        count = place = len(hashes)
        while place > self._first(count):
            place -= 1
            if not found(state_hash(hashes[place], self.num_blocks - 1)):
                count = place
        return count

    def chain(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the hashes that another node needs: these blocks, and in the last window also their pages.

        Each page follows its block. So a node with the chain of a shorter sequence has the beginning of this one,
        including the pages that both need."""
        first = self._first(len(hashes))
        window = (name for each in hashes[first:] for name in (each, *state_hashes(each, self.num_blocks)))
        return [*hashes[:first], *window]

    def tokens_of(self, blocks: int) -> int:
        """Return how many of a chain's `blocks` blocks, those of its pages included, hold tokens of all layers."""
        with_all = 1 + self.num_blocks
        return blocks // with_all if blocks <= self._before * with_all else blocks - self.max_sent_blocks

    def tokens_before(self, index: int, blocks: int) -> int:
        """Return how many of the first `index` blocks of a chain of `blocks` blocks hold tokens of all layers."""
        first = self._first(self.tokens_of(blocks))
        return index if index <= first else first + blocks_for(index - first, 1 + self.num_blocks)

    def parent(self, index: int, blocks: int) -> int:
        """Return the index of the parent of a block in a chain of `blocks` blocks; -1: it is the first."""
        page, place = divmod(index - self._first(self.tokens_of(blocks)), 1 + self.num_blocks)
        return index - 1 - self.num_blocks if page > 0 and not place else index - 1

    def held(self, request: Request) -> int:
        """Return the leading blocks of a running request that a copy can have: all full ones, with their pages."""
        pages = request.windows
        if pages is None:
            return 0
        count = min(request.registered, pages.registered)
        return count if pages.first <= self._first(count) else 0

    def reused(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks to hold of the pages that a request needs to reuse these leading blocks."""
        pages = hashes[self._first(len(hashes)) :]
        return self._pool.match([name for each in pages for name in state_hashes(each, self.num_blocks)])

    def _here(self, block_hash: bytes) -> bool:
        return bool(self._pool.match((block_hash,)))

    def _first(self, count: int) -> int:
        """Return the first page that is needed after `count` full blocks."""
        return max(0, count - self._before)
