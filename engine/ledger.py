"""Ledger of block holds: the only authority on whether a KV block may be reused.

A hold is (owner, reason, block). A block may carry many: requests share a prefix, and a transfer still reads blocks
that its request no longer needs. A block may be reused once its last hold is gone, and only then. The engine defines
the reasons (engine/block_interfaces.py).

Single-threaded: only the engine thread calls it. Misuse (releasing a block not held, holding twice) is a bug; it
asserts and leaves the ledger unchanged."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from kvferry.engine import audit_counts


class Ledger:
    """Holds on blocks 0 … num_blocks - 1. Every operation is O(1) per block it names."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        self._pages: dict[str, dict[Hashable, dict[int, None]]] = {}
        self._num_held = 0
        self._recounts: list[audit_counts.HoldCounts] = []

    @property
    def num_held(self) -> int:
        """Number of blocks with at least one hold."""
        return self._num_held

    def hold(self, owner: Hashable, reason: str, block_ids: Iterable[int]) -> None:
        """Add one hold per block. The owner must not hold any of them for this reason yet, and ids must not repeat."""
        listed = list(block_ids)
        fresh = dict.fromkeys(listed)
        owned = self._pages.get(reason, {}).get(owner, {})
        assert len(fresh) == len(listed), f"{owner!r} names a block twice: {listed}"
        for block_id in fresh:
            assert 0 <= block_id < self.num_blocks, f"block {block_id} is not in the pool of {self.num_blocks}"
            assert block_id not in owned, f"{owner!r} already holds block {block_id} for {reason}"
        if not fresh:
            return
        self._pages.setdefault(reason, {}).setdefault(owner, {}).update(fresh)
        for block_id in fresh:
            self._num_held += self._counts[block_id] == 0
            self._counts[block_id] += 1
        self._changed(reason, owner, fresh, 1)

    def release(self, owner: Hashable, reason: str, block_ids: Iterable[int] | None = None) -> list[int]:
        """Drop holds: of these blocks, or of all that the owner holds for the reason.

        Returns the blocks that now have no hold, in the order named (None: in the order in which they were held)."""
        owned = self._pages.get(reason, {}).get(owner, {})
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
        self._changed(reason, owner, going, -1)
        if not owned:
            self._forget(owner, reason)
        return freed

    def move(self, owner: Hashable, old_reason: str, new_reason: str) -> None:
        """Turn all holds of the owner for one reason into holds for another; no block becomes reusable in between."""
        assert old_reason != new_reason, old_reason
        moving = self._pages.get(old_reason, {}).get(owner, {})
        existing = self._pages.get(new_reason, {}).get(owner, {})
        both = moving.keys() & existing.keys()
        assert not both, f"{owner!r} already holds {sorted(both)} for {new_reason}"
        if moving:
            self._forget(owner, old_reason)
            self._pages.setdefault(new_reason, {})[owner] = existing | moving
            self._changed(old_reason, owner, moving, -1)
            self._changed(new_reason, owner, moving, 1)

    def held(self, block_id: int) -> bool:
        """Return whether anybody holds the block."""
        return self._counts[block_id] > 0

    def owners(self) -> Iterator[tuple[str, Hashable]]:
        """Yield (reason, owner) of all holds; the ledger must not change meanwhile."""
        return ((reason, owner) for reason, pages in self._pages.items() for owner in pages)

    def check_integrity(self) -> None:
        """Assert that the counts agree."""
        for _ in self.audit():
            pass
        held = sum(count > 0 for count in self._counts)
        assert self._num_held == held, f"{held} blocks are held, not {self._num_held}"

    def audit(self) -> Iterator[None]:
        """Run `check_integrity` in pieces, between which holds may change."""
        assert all(self._pages.values()), "a reason without holds"
        counts = yield from audit_counts.zeros(self.num_blocks)
        recount = audit_counts.HoldCounts(counts, self.owners())
        self._recounts.append(recount)
        try:
            while recount.unread:
                (reason, owner), _ = recount.unread.popitem()
                page = list(self._page(reason, owner))
                for piece in audit_counts.strides(len(page)):
                    for i in piece:
                        counts[page[i]] += 1
                    yield
            for piece in audit_counts.strides(self.num_blocks):
                part = slice(piece.start, piece.stop)
                assert counts[part].tolist() == self._counts[part], f"counts of {piece} differ from the holds"
                yield
        finally:
            self._recounts.remove(recount)

    def _page(self, reason: str, owner: Hashable) -> dict[int, None]:
        """Return the owner's page, which is never empty while it exists; nothing of it if it is gone."""
        page = self._pages.get(reason, {}).get(owner)
        assert page is None or page, f"empty page of {owner!r} for {reason}"
        return page or {}

    def _changed(self, reason: str, owner: Hashable, block_ids: Iterable[int], by: int) -> None:
        for recount in self._recounts:
            recount.changed(reason, owner, block_ids, by)

    def _forget(self, owner: Hashable, reason: str) -> None:
        pages = self._pages.get(reason, {})
        pages.pop(owner, None)
        if not pages:
            self._pages.pop(reason, None)
