"""Eviction order of idle blocks: segmented LRU (Karedla et al., 1994)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

PROTECTED = 20
"""One of this many blocks of a pool may be idle and protected because it was found again.

With more, blocks of long documents, soon done with, would stay longer than those of new ones: `python -m
benchmarks.eviction`."""


class SegmentedLru:
    """Blocks with content that nothing uses, in eviction order. Owned by the engine thread.

    Blocks that were found again leave after the others; at most `protected` of them count as such. Among equals the one
    that is idle for longest leaves first. Users of a block use those before it and release it first, so it leaves
    before its parent."""

    def __init__(self, protected: int) -> None:
        self._protected = protected
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._found: set[int] = set()

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._once or block_id in self._again

    def found(self, block_ids: Iterable[int]) -> None:
        """Promote blocks that were found again and are about to be used."""
        self._found.update(block_ids)

    def put(self, block_id: int) -> None:
        """Add a block that has no user left."""
        if block_id not in self._found:
            self._once[block_id] = None
            return
        self._again[block_id] = None
        if len(self._again) > self._protected:
            self._once[self._again.popitem(last=False)[0]] = None

    def remove(self, block_id: int) -> None:
        """Remove a block that is used again, or whose content is wrong; ignored if it was not idle."""
        self._once.pop(block_id, None)
        self._again.pop(block_id, None)

    def pop(self) -> int:
        """Return the one to leave. Raises KeyError if none is idle."""
        return (self._once or self._again).popitem(last=False)[0]

    def forget(self, block_id: int) -> None:
        """Forget a block that has lost its content."""
        self._found.discard(block_id)
