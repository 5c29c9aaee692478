"""Block pool: allocates KV blocks, finds cached prefixes, and evicts idle blocks.

A block is free (no content), cached (found by its hash, not held), or held (by requests, grants, transfers). The ledger
records the holds. Chains are held as a whole and released tail first, so a block precedes its parent in the eviction
order: a node never drops a block before its descendants."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvferry.engine import audit_counts
from kvferry.engine.block_contents import BlockContents
from kvferry.engine.block_interfaces import EvictionOrder, Holds
from kvferry.engine.cache_use import CacheUse
from kvferry.engine.eviction import ValueEviction
from kvferry.engine.free_list import FreeList
from kvferry.engine.index_changes import IndexChanges
from kvferry.engine.miss_reasons import EVICTED, MissReasons
from kvferry.engine.partial_blocks import PartialBlocks


@dataclass(slots=True)
class Block:
    """Block of the pool. `hash` is set while it can be found; `children` counts findable blocks whose parent it is."""

    hash: bytes | None = None
    parent: int | None = None
    children: int = 0


class BlockPool:
    """Allocation, prefix reuse and leaf-first eviction over `num_blocks` blocks. Owned by the engine thread."""

    def __init__(self, num_blocks: int, holds: Holds, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.holds = holds
        self.prefix_caching = prefix_caching
        self.evicted_total = self.registered_total = 0
        self.tails = PartialBlocks(enabled=prefix_caching)
        self.miss_reasons = MissReasons(num_blocks)
        self.idle: EvictionOrder = ValueEviction(num_blocks)
        self._blocks = [Block() for _ in range(num_blocks)]
        self._free = FreeList(num_blocks)
        self._by_hash: dict[bytes, int] = {}
        self.changes = IndexChanges()
        self.contents: BlockContents | None = None
        self._recounts: list[audit_counts.ChildCounts] = []

    @property
    def free_blocks(self) -> int:
        """Number of blocks without content."""
        return len(self._free)

    @property
    def cached_blocks(self) -> int:
        """Number of blocks with content that nothing holds."""
        return len(self.idle)

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated now, by eviction if necessary."""
        return len(self._free) + len(self.idle)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the ids of the longest leading run of `hashes` in the pool. Takes no hold."""
        found: list[int] = []
        for block_hash in hashes if self.prefix_caching else ():
            if (block_id := self._by_hash.get(block_hash)) is None:
                break
            found.append(block_id)
        return found

    def has_room(self, reused: Sequence[int], fresh: int, keep: int = 0) -> bool:
        """Return whether `acquire` could hold these blocks."""
        return fresh + keep <= self.available - sum(block_id in self.idle for block_id in reused)

    def acquire(
        self, owner: Hashable, reason: str, reused: Sequence[int], fresh: int, *, keep: int = 0,
        cache_use: CacheUse | None = None, hashes: Sequence[bytes] = (),
    ) -> list[int] | None:  # fmt: skip
        """Hold `reused` (fresh from `match`) and `fresh` new blocks for the owner; return their ids in order.

        None, with nothing changed, if fewer than `keep` blocks would stay available. A request gives its cache_use
        and the hashes of all blocks that it could have reused."""
        if not self.has_room(reused, fresh, keep):
            return None
        if cache_use is not None:
            self.idle.use(cache_use, reused, hashes)
        for block_id in reused:
            self.idle.remove(block_id)
        taken = [*reused, *(self._take() for _ in range(fresh))]
        self.holds.hold(owner, reason, taken)
        return taken

    def release(self, owner: Hashable, reason: str, chain: Sequence[int]) -> None:
        """Give up the owner's hold on a chain of blocks (in sequence order)."""
        for block_id in self.holds.release(owner, reason, list(reversed(chain))):
            self._release_block(block_id)

    def register(
        self, holders: Sequence[tuple[Hashable, str]], block_id: int, block_hash: bytes, parent: int | None, *,
        tiers: bool = True,
    ) -> int:  # fmt: skip
        """Make a block with complete content findable; return the id of the block to use. tiers: see IndexChanges.

        If equal content is findable already, the holds (owner, reason) move to that block, so that every findable
        block's parent is. Blocks after a forgotten block stay as they are: chains are held as a whole."""
        known = self._by_hash.get(block_hash)
        if not self.prefix_caching or known == block_id:
            return block_id
        if parent is not None and self._blocks[parent].hash is None:
            return block_id
        if known is not None:
            self.idle.remove(known)
            for owner, reason in holders:
                self.holds.hold(owner, reason, [known])
                self.release(owner, reason, [block_id])
            return known
        block = self._blocks[block_id]
        assert block.hash is None, "a block's content changed while it was in the prefix cache"
        block.hash, block.parent = block_hash, parent
        if parent is not None:
            self._blocks[parent].children += 1
            self._changed(block_id, parent, 1)
        self._by_hash[block_hash] = block_id
        self.registered_total += 1
        self.miss_reasons.arrived(block_hash)
        self.changes.add(block_hash, None if parent is None else self._blocks[parent].hash, tiers=tiers)
        return block_id

    def forget(self, block_ids: Iterable[int]) -> None:
        """Unregister these blocks and their descendants, because their content is wrong. Scans all blocks."""
        behind: dict[int, list[int]] = {}
        for block_id, block in enumerate(self._blocks):
            if block.parent is not None:
                behind.setdefault(block.parent, []).append(block_id)
        going = dict.fromkeys(block_ids)
        left = list(going)
        while left:
            children = [child for child in behind.get(left.pop(), ()) if child not in going]
            going.update(dict.fromkeys(children))
            left += children
        for block_id in going:
            self.tails.forget(block_id)
            idle = block_id in self.idle
            if self._blocks[block_id].hash is not None:
                self._unregister(block_id, "retracted")
            if idle:
                self._free.put(block_id)

    def findable(self) -> list[bytes]:
        """Return all hashes that can be reused here, parents before children.

        May be called from any thread: the copy is one bytecode."""
        return list(self._by_hash)

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one state and that every findable block's parent is findable."""
        for _ in self.audit():
            pass

    def audit(self) -> Iterator[None]:
        """Run `check_integrity` in pieces of a fraction of a millisecond, between which the pool may be used.

        A lasting fault is found in one of two passes."""
        yield from self.holds.audit()
        recount = audit_counts.ChildCounts((yield from audit_counts.zeros(self.num_blocks)))
        self._recounts.append(recount)
        try:
            for piece in audit_counts.strides(self.num_blocks):
                for block_id in piece:
                    self._check(block_id)
                recount.read(piece, [self._blocks[block_id].parent for block_id in piece])
                yield
            for piece in audit_counts.strides(self.num_blocks):
                counts = [self._blocks[block_id].children for block_id in piece]
                assert recount.counts[piece.start : piece.stop].tolist() == counts, f"children of {piece} miscounted"
                yield
        finally:
            self._recounts.remove(recount)
        for piece in audit_counts.strides(self.num_blocks):
            self._free.check(piece)
            yield
        counted = self.available + self.holds.num_held
        assert counted == self.num_blocks, f"{counted} blocks are free, cached or held, of {self.num_blocks}"

    def _check(self, block_id: int) -> None:
        block, free, cached = self._blocks[block_id], block_id in self._free, block_id in self.idle
        assert not (free and cached), f"block {block_id} is free and cached"
        assert (free or cached) != self.holds.held(block_id), f"block {block_id} leaked or is free while held"
        self.idle.check(block_id, leaf=not block.children)
        if block.hash is None:
            assert not cached, f"cached block {block_id} cannot be found"
            assert block.parent is None, f"block {block_id} has a parent but cannot be found"
            return
        assert not free, f"free block {block_id} can be found"
        assert self._by_hash.get(block.hash) == block_id, f"block {block_id} is not found by its hash"
        if block.parent is not None:
            assert self._blocks[block.parent].hash is not None, f"block {block_id} is cached without its parent"

    def _take(self) -> int:
        if not self._free:
            self._evict()
        block_id = self._free.take()
        self.tails.forget(block_id)
        return block_id

    def _evict(self) -> None:
        block_id = self.idle.pop()
        assert not self._blocks[block_id].children, "evicted before its descendants"
        self._unregister(block_id, EVICTED)
        self.evicted_total += 1
        self._free.put(block_id)

    def _unregister(self, block_id: int, reason: str) -> None:
        """Make the block unfindable."""
        block = self._blocks[block_id]
        assert block.hash is not None
        self.idle.forget(block_id, block.hash, evicted=reason == EVICTED)
        del self._by_hash[block.hash]
        self.miss_reasons.note((block.hash,), reason)
        self.changes.remove(block.hash)
        if self.contents is not None:
            self.contents.forget(block.hash)
        if block.parent is not None:
            self._blocks[block.parent].children -= 1
            self._changed(block_id, block.parent, -1)
            if not self._blocks[block.parent].children:
                self.idle.became_leaf(block.parent)
        block.hash = block.parent = None

    def _release_block(self, block_id: int) -> None:
        if self._blocks[block_id].hash is not None:
            self.idle.put(block_id, leaf=not self._blocks[block_id].children)
        else:
            self._free.put(block_id, last=block_id in self.tails)

    def _changed(self, block_id: int, parent: int, by: int) -> None:
        for recount in self._recounts:
            recount.changed(block_id, parent, by)


def chain_of(pool: BlockPool, block_hash: bytes, besides: Container[bytes] = ()) -> list[tuple[bytes, int]]:
    """Return (hash, block id) of a block and its ancestors after the last one in `besides`; empty if it is not here."""
    found, block_id = [], pool._by_hash.get(block_hash)
    while block_id is not None and (known := pool._blocks[block_id].hash or b"") not in besides:
        found.append((known, block_id))
        block_id = pool._blocks[block_id].parent
    return found[::-1]
