"""Eviction policies that the simulator compares with the engine's own: LRU, SLRU, GDSF and S3-FIFO, by name.

Each replaces a pool's `ValueEviction`. A block with children in the pool is never evicted: chains are evicted from
their tails."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvferry.engine.block_interfaces import EvictionOrder
from kvferry.engine.cache_use import CacheUse
from kvferry.engine.eviction import ValueEviction
from kvferry.simulate.choices import check_known
from kvferry.simulate.segmented_lru import PROTECTED, SegmentedLru, WithoutSessions

if TYPE_CHECKING:
    from kvferry.engine.block_pool import BlockPool

EVICTIONS = ("value", "lru", "slru", "s3fifo", "gdsf", "gdsf-cost")
"""Names of the policies; the first is the engine's own."""
SMALL = 10
"""Divisor of the pool for S3-FIFO: one block in SMALL may be in the queue of blocks used once."""
MAX_USES = 3
"""Maximum use count that S3-FIFO keeps per block."""
COST_BLOCKS = 512
"""Position in blocks at which recomputing a block costs twice as much (Machine.attention_len)."""
MAX_SCANS = 64
"""Maximum number of queue heads tried per eviction; then the block idle for longest is evicted."""


def order_of(name: str, pool: BlockPool, clock: Callable[[], float] | None = None) -> EvictionOrder:
    """Return the eviction policy of that name for the pool. Raises ConfigError."""
    check_known("eviction", name, EVICTIONS)
    if name == "value":
        return ValueEviction(pool.num_blocks, clock)
    if name in ("lru", "slru"):
        return SegmentedLru(pool.num_blocks // PROTECTED if name == "slru" else 0)
    if name == "s3fifo":
        return S3Fifo(pool)
    return Gdsf(pool, attention_blocks=COST_BLOCKS if name == "gdsf-cost" else 0)


class KnownBlocks(WithoutSessions):
    """Common part of the policies: the idle blocks, and content hashes of blocks."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__()
        self._pool = pool
        self._idle: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._idle

    def remove(self, block_id: int) -> None:
        self._idle.pop(block_id, None)

    def forget(self, block_id: int, block_hash: bytes, *, evicted: bool) -> None:
        self.remove(block_id)

    def _leaf(self, block: int) -> bool:
        return not self._pool._blocks[block].children

    def _hash(self, block: int) -> bytes:
        known = self._pool._blocks[block].hash
        assert known is not None
        return known


class Gdsf(KnownBlocks):
    """Greedy dual size frequency (Cherkasova, 1998).

    A block's rank is its use count times its cost to recompute, plus the rank of the block evicted last. The cost is 1,
    or grows with the block's position. The lowest rank is evicted."""

    def __init__(self, pool: BlockPool, *, attention_blocks: int = 0) -> None:
        super().__init__(pool)
        self._attention_blocks = attention_blocks
        self._depth: dict[bytes, int] = {}
        self._uses: dict[bytes, int] = {}
        self._rank: dict[int, float] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._age, self._entered = 0.0, 0

    def use(self, cache_use: CacheUse, reused: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Count another use of each block."""
        for block in reused:
            key = self._hash(block)
            self._uses[key] = self._uses.get(key, 1) + 1

    def put(self, block_id: int, *, leaf: bool) -> None:
        """Add a block that has no user left, and rank it."""
        self._idle[block_id] = None
        self._rank[block_id] = self._age + self._uses.setdefault(self._hash(block_id), 1) * self._cost(block_id)
        if self._leaf(block_id):
            self._enter(block_id)

    def pop(self) -> int:
        """Remove and return the leaf of the lowest rank."""
        while True:
            rank, _, block = heapq.heappop(self._heap)
            if block in self._idle and self._rank[block] == rank and self._leaf(block):
                break
        del self._idle[block]
        self._age = max(self._age, rank)
        self._uses.pop(self._hash(block), None)
        self._depth.pop(self._hash(block), None)
        parent = self._pool._blocks[block].parent
        if parent in self._idle and self._pool._blocks[parent].children == 1:
            self._enter(parent)  # it becomes a leaf
        return block

    def _enter(self, block: int) -> None:
        """Add a leaf to the heap; only leaves are there, since a parent may rank below its children."""
        self._entered += 1
        heapq.heappush(self._heap, (self._rank[block], self._entered, block))

    def _cost(self, block: int) -> float:
        """Return the cost to recompute the block, in units of a chain's first block."""
        if not self._attention_blocks:
            return 1.0
        chain, at = [], block
        while (parent := self._pool._blocks[at].parent) is not None and self._hash(at) not in self._depth:
            chain.append(at)
            at = parent
        first = self._depth.setdefault(self._hash(at), 0)
        for place, each in enumerate(reversed(chain), first + 1):
            self._depth[self._hash(each)] = place
        return 1 + self._depth[self._hash(block)] / self._attention_blocks


class S3Fifo(KnownBlocks):
    """S3-FIFO (Yang et al., 2023).

    New blocks wait in a small queue. Blocks that are used again there, or that were evicted recently, go to the main
    queue, where each use gives another round."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._where: dict[int, tuple[deque[int], bytes]] = {}
        self._uses: dict[bytes, int] = {}
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._most_small = max(1, pool.num_blocks // SMALL)

    def use(self, cache_use: CacheUse, reused: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Count another use of each block, up to MAX_USES."""
        for block in reused:
            key = self._hash(block)
            self._uses[key] = min(MAX_USES, self._uses.get(key, 0) + 1)

    def put(self, block_id: int, *, leaf: bool) -> None:
        """Add a block that has no user left, and queue it unless it is queued already."""
        self._idle[block_id] = None
        key = self._hash(block_id)
        if (known := self._where.get(block_id)) is not None and known[1] == key:
            return
        queue = self._main if self._ghosts.pop(key, self) is None else self._small
        self._where[block_id] = (queue, key)
        queue.append(block_id)

    def pop(self) -> int:
        """Remove and return the block to evict."""
        for _ in range(MAX_SCANS):
            small = self._small and (len(self._small) > self._most_small or not self._main)
            block = self._from(self._small if small else self._main)
            if block is not None:
                return block
        block = next(each for each in self._idle if self._leaf(each))
        self._leave(block)
        return block

    def _from(self, queue: deque[int]) -> int | None:
        """Return the head of the queue if it is evicted; None if it was moved or is out of date."""
        if not queue:
            return None
        block = queue.popleft()
        known = self._where.get(block)
        current = self._pool._blocks[block].hash
        if known is None or known[0] is not queue or known[1] != current:
            return None
        key, uses = known[1], self._uses.get(known[1], 0)
        if block not in self._idle:
            del self._where[block]  # it is queued again once idle
        elif not self._leaf(block):
            queue.append(block)
        elif uses:
            self._uses[key] = 0 if queue is self._small else uses - 1
            self._where[block] = (self._main, key)
            self._main.append(block)
        else:
            if queue is self._small:
                self._ghosts[key] = None
                if len(self._ghosts) > self._pool.num_blocks:
                    self._ghosts.popitem(last=False)
            self._leave(block)
            return block
        return None

    def _leave(self, block: int) -> None:
        key = self._hash(block)
        del self._idle[block]
        self._where.pop(block, None)
        self._uses.pop(key, None)
