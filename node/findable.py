"""Which blocks others may count on at this node: those in its pool, and those in a slower memory of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.block_pool import is_findable
from kv_transfer.tiers.disk import DiskTier
from node.assembly import Assembled
from node.tiers import open_tier
from protocol.settings import WorkerSettings


class Findable:
    """What the block index is told. From any thread. tell: takes (hashes stored, hashes removed), once it is known."""

    def __init__(self, settings: WorkerSettings, parts: Assembled) -> None:
        self._pool = parts.engine.pool
        self.tell: Callable[[Sequence[bytes], Sequence[bytes]], None] = lambda stored, removed: None
        self.tier: DiskTier | None = open_tier(settings, parts, self._changed)

    @property
    def kept_bytes(self) -> int:
        """That the slower memory takes."""
        return self.tier.used if self.tier else 0

    def all(self) -> list[bytes]:
        """Hashes of all blocks that can be reused here; those of the pool parents before children."""
        here = self._pool.findable()
        return here if self.tier is None else list(dict.fromkeys((*here, *self.tier.hashes())))

    def note(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """The pool's blocks changed: what is on disk can still be reused."""
        if self.tier is not None:
            removed = [each for each in removed if each not in self.tier]
        self.tell(stored, removed)

    def close(self) -> None:
        """Nothing is read or written any more."""
        if self.tier is not None:
            self.tier.close()

    def _changed(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        if gone := [each for each in removed if not is_findable(self._pool, each)]:
            self.tell((), gone)
