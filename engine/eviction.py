"""Eviction order of idle blocks: segmented LRU (Karedla et al., 1994)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

PROTECTED = 20
"""One block of a pool of so many may be idle and protected, which is for having been found again. More of them would
keep blocks of long documents, soon done with, before those of new ones: `python -m benchmarks.eviction`."""


class SegmentedLru:
    """Blocks with content that nobody uses.

    Those that were found again leave after the others, `protected` of them at most (the rest count as others anew), of
    those alike the one that is idle for longest. Who uses a block uses those before it, and lets go of it first; so it
    leaves before its parent. Owned by the engine thread."""

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
        """It is used, or what it holds is wrong. Nothing if it was not idle."""
        self._once.pop(block_id, None)
        self._again.pop(block_id, None)

    def pop(self) -> int:
        """Return the one to leave. Raises KeyError if none is idle."""
        return (self._once or self._again).popitem(last=False)[0]

    def forget(self, block_id: int) -> None:
        """It has lost its content."""
        self._found.discard(block_id)
