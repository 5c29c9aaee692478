"""Memory: KV block pool of a simulated node, built on the engine's own pool and ledger."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from kvferry.engine.block_interfaces import REQUEST
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.cache_use import CacheUse
from kvferry.engine.ledger import Ledger
from kvferry.simulate.eviction import EVICTIONS, order_of

COPY_KEPT = 4
"""Divisor of the pool: one block in COPY_KEPT must stay available after a copy (engine/replication.py)."""


class Memory(BlockPool):
    """Block pool in which each owner holds one chain.

    A chain has leading blocks that were found in the pool, then fresh blocks, which get their hashes once computed."""

    def __init__(self, num_blocks: int, eviction: str = EVICTIONS[0], clock: Callable[[], float] | None = None) -> None:
        super().__init__(num_blocks, Ledger(num_blocks))
        self.idle = order_of(eviction, self, clock)
        self._chains: dict[Hashable, list[int]] = {}
        self._uses: dict[Hashable, CacheUse] = {}

    def found(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks that are in the pool."""
        return len(self.match(hashes))

    def take(
        self, owner: Hashable, hashes: Sequence[bytes], blocks: int, *, keep: int = 0, cache_use: CacheUse | None = None
    ) -> int | None:
        """Hold a chain of `blocks` blocks; return how many of `hashes` were found, or None without enough blocks.

        keep: blocks that must stay available. cache_use: the request's, unless these are copies."""
        reused = self.match(hashes)[:blocks]
        chain = self.acquire(
            owner, REQUEST, reused, blocks - len(reused), keep=keep, cache_use=cache_use, hashes=hashes
        )
        if chain is None:
            return None
        self._chains[owner] = chain
        if cache_use is not None:
            self._uses[owner] = cache_use
        return len(reused)

    def fill(self, owner: Hashable, hashes: Sequence[bytes]) -> None:
        """Register the owner's leading blocks under these hashes."""
        chain = self._chains[owner]
        parent: int | None = None
        for place, block_hash in enumerate(hashes[: len(chain)]):
            if self._by_hash.get(block_hash) != chain[place]:
                chain[place] = self.register([(owner, REQUEST)], chain[place], block_hash, parent)
            parent = chain[place]

    def release_owner(self, owner: Hashable) -> None:
        """Release the owner's chain, if it has one."""
        if (chain := self._chains.pop(owner, None)) is not None:
            if (cache_use := self._uses.pop(owner, None)) is not None:
                findable = (place for place, block_id in enumerate(chain) if self._blocks[block_id].hash is None)
                self.idle.rest(cache_use, chain[: next(findable, len(chain))])
            self.release(owner, REQUEST, chain)

    def copy(self, owner: Hashable, hashes: Sequence[bytes]) -> bool:
        """Cache blocks that another node computed; return False without enough blocks."""
        if self.take(owner, hashes, len(hashes), keep=self.num_blocks // COPY_KEPT) is None:
            return False
        self.fill(owner, hashes)
        self.release_owner(owner)
        return True
