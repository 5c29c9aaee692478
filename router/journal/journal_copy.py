"""JournalCopy: what a router keeps of a journal that it writes, to write it again after the store has lost its data."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.protocol.wire import pack, unpack

MAX_COPIED_BYTES = 64 * 2**20
"""Largest size of all copies of one router; journals beyond it are not written again."""
_LENGTH = 4
"""Bytes of an entry's length before it."""


def joined(entries: Sequence[bytes]) -> bytes:
    """Return one entry with the contents of several; b"" if there are none."""
    items = [item for entry in entries if entry for item in unpack(entry)]
    return pack(items) if items else b""


class CopyBudget:
    """Bound of all copies of a router, in bytes. Copies give their bytes back with `release`."""

    def __init__(self, max_bytes: int = MAX_COPIED_BYTES) -> None:
        self._free = max_bytes

    def take(self, size: int) -> bool:
        """Return whether this many bytes were free; they are taken then."""
        if size > self._free:
            return False
        self._free -= size
        return True

    def release(self, size: int) -> None:
        """Give bytes back."""
        self._free += size


class JournalCopy:
    """Head and written entries of one journal."""

    __slots__ = ("_budget", "_entries", "head")

    def __init__(self, head: bytes, budget: CopyBudget) -> None:
        self.head, self._budget = head, budget
        self._entries = bytearray()

    @classmethod
    def within(cls, budget: CopyBudget, head: bytes) -> JournalCopy | None:
        """Return a copy; None if the budget has no room for its head."""
        return cls(head, budget) if budget.take(len(head)) else None

    def add(self, entry: bytes) -> bool:
        """Add an entry that was written; return False if the budget has no room for it."""
        if not self._budget.take(len(entry) + _LENGTH):
            return False
        self._entries += len(entry).to_bytes(_LENGTH, "big")
        self._entries += entry
        return True

    def whole(self, unwritten: bytes) -> bytes:
        """Return one entry with everything in the copy and an unwritten entry; b"" if there is nothing."""
        entries, at = list[bytes](), 0
        while at < len(self._entries):
            end = at + _LENGTH + int.from_bytes(self._entries[at : at + _LENGTH], "big")
            entries.append(bytes(self._entries[at + _LENGTH : end]))
            at = end
        return joined([*entries, unwritten])

    def clear(self) -> None:
        """Forget the entries, which are to be written and added again."""
        self._budget.release(len(self._entries))
        self._entries = bytearray()

    def release(self) -> None:
        """Give all bytes back to the budget."""
        self._budget.release(len(self.head) + len(self._entries))
