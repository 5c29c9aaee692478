"""The ledger of holds: the only authority on whether a KV block may be reused.

A hold is (owner, reason, block). A block may carry many at once: requests share a prefix, and a ship still reads what
its request no longer needs. A block whose last hold is gone may be reused; nothing else makes it reusable.
Reasons are the engine's words (engine/ports.py).
Single-threaded: only the engine thread calls it. Misuse (releasing what is not held, holding twice) is a bug of ours
and asserts, leaving the books untouched.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class Ledger:
    """Holds on blocks 0 … num_blocks - 1. Every operation is O(1) per block it names."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        self._books: dict[str, dict[Hashable, dict[int, None]]] = {}
        self._num_held = 0

    @property
    def num_held(self) -> int:
        """Number of blocks with at least one hold."""
        return self._num_held

    def hold(self, owner: Hashable, reason: str, block_ids: Iterable[int]) -> None:
        """Add one hold per block. The owner must not hold any of them for this reason yet, and ids must not repeat."""
        wanted = list(block_ids)
        fresh = dict.fromkeys(wanted)
        owned = self._books.get(reason, {}).get(owner, {})
        assert len(fresh) == len(wanted), f"{owner!r} names a block twice: {wanted}"
        for block_id in fresh:
            assert 0 <= block_id < self.num_blocks, f"block {block_id} is not in the pool of {self.num_blocks}"
            assert block_id not in owned, f"{owner!r} already holds block {block_id} for {reason}"
        if not fresh:
            return
        self._books.setdefault(reason, {}).setdefault(owner, {}).update(fresh)
        for block_id in fresh:
            self._num_held += self._counts[block_id] == 0
            self._counts[block_id] += 1

    def release(self, owner: Hashable, reason: str, block_ids: Iterable[int] | None = None) -> list[int]:
        """Drop holds: of these blocks, or of all that the owner holds for the reason. Returns the blocks that now have
        no hold at all, in the order named (None: the order in which they were held)."""
        owned = self._books.get(reason, {}).get(owner, {})
        going = list(owned) if block_ids is None else list(block_ids)
        assert len(set(going)) == len(going), f"{owner!r} names a block twice: {going}"
        for block_id in going:
            assert block_id in owned, f"{owner!r} does not hold block {block_id} for {reason}"
        freed = []
        for block_id in going:
            del owned[block_id]
            self._counts[block_id] -= 1
            if not self._counts[block_id]:
                freed.append(block_id)
        self._num_held -= len(freed)
        if not owned:
            self._forget(owner, reason)
        return freed

    def move(self, owner: Hashable, old_reason: str, new_reason: str) -> None:
        """Turn all holds of the owner for one reason into holds for another; no block becomes reusable in between."""
        assert old_reason != new_reason, old_reason
        moving = self._books.get(old_reason, {}).get(owner, {})
        standing = self._books.get(new_reason, {}).get(owner, {})
        both = moving.keys() & standing.keys()
        assert not both, f"{owner!r} already holds {sorted(both)} for {new_reason}"
        if moving:
            self._forget(owner, old_reason)
            self._books.setdefault(new_reason, {})[owner] = standing | moving

    def held(self, block_id: int) -> bool:
        return self._counts[block_id] > 0

    def check_integrity(self) -> None:
        """Assert that counts and books agree."""
        counts = [0] * self.num_blocks
        for reason, book in self._books.items():
            assert book, f"empty book for {reason}"
            for owner, ids in book.items():
                assert ids, f"empty page of {owner!r} for {reason}"
                for block_id in ids:
                    counts[block_id] += 1
        assert counts == self._counts, "counts differ from the books"
        assert self._num_held == sum(count > 0 for count in counts), self._num_held

    def _forget(self, owner: Hashable, reason: str) -> None:
        book = self._books.get(reason, {})
        book.pop(owner, None)
        if not book:
            self._books.pop(reason, None)
