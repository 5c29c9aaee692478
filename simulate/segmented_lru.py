"""LRU and segmented LRU (the engine's former eviction policy), and a base for policies that ignore sessions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvferry.engine.cache_use import CacheUse, IdleStats, Pause

PROTECTED = 20
"""One of this many blocks of a pool may be idle and protected because it was found again."""


class WithoutSessions:
    """Base of eviction policies that ignore sessions."""

    def __init__(self) -> None:
        self.stats = IdleStats()

    def rest(self, cache_use: CacheUse, block_ids: Sequence[int]) -> None:
        """Do nothing."""

    def evict_first(self, block_ids: Sequence[int]) -> None:
        """Do nothing."""

    def pause(self, request_id: str, reason: Pause, tools: int = 0) -> None:
        """Do nothing."""

    def close(self, session: str) -> None:
        """Do nothing."""

    def became_leaf(self, block_id: int) -> None:
        """Do nothing."""

    def check(self, block_id: int, *, leaf: bool) -> None:
        """Do nothing."""


class SegmentedLru(WithoutSessions):
    """Segmented LRU (Karedla et al., 1994).

    Blocks that were reused are evicted after all other blocks; at most `protected` count as reused. Among equals the
    one idle for longest is evicted first. Users of a block also use those before it and release it first, so it is
    evicted before its parent. `protected` 0: LRU."""

    def __init__(self, protected: int) -> None:
        super().__init__()
        self._protected = protected
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._found: set[int] = set()

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._once or block_id in self._again

    def use(self, cache_use: CacheUse, reused: Sequence[int], hashes: Sequence[bytes]) -> None:
        self._found.update(reused)

    def put(self, block_id: int, *, leaf: bool) -> None:
        if block_id not in self._found:
            self._once[block_id] = None
            return
        self._again[block_id] = None
        if len(self._again) > self._protected:
            self._once[self._again.popitem(last=False)[0]] = None

    def remove(self, block_id: int) -> None:
        self._once.pop(block_id, None)
        self._again.pop(block_id, None)

    def pop(self) -> int:
        return (self._once or self._again).popitem(last=False)[0]

    def forget(self, block_id: int, block_hash: bytes, *, evicted: bool) -> None:
        self.remove(block_id)
        self._found.discard(block_id)
