"""Changes of the pool for the block index and the tiers: registered blocks added and removed since the last report."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.protocol.index_rows import behind


class IndexChanges:
    """Changes reported by the pool, on its thread.

    stored, removed: hashes and rows since the last `drain`; none is in both. untiered: blocks that no tier keeps."""

    def __init__(self) -> None:
        self._rows: dict[bytes, bytes] = {}
        self._stored: dict[bytes, bytes] = {}
        self._removed: dict[bytes, bytes] = {}
        self.untiered: set[bytes] = set()
        self._kept: list[bytes] = []

    def add(self, block_hash: bytes, parent: bytes | None, *, tiers: bool = True) -> None:
        """Note that a block is findable, and so is its parent, unless it is a chain's first.

        tiers: whether they are to keep it."""
        if not tiers:
            self.untiered.add(block_hash)
        row = self._rows[block_hash] = behind(self._rows[parent] if parent is not None else b"", block_hash)
        if self._removed.pop(block_hash, None) is None:
            self._stored[block_hash] = row

    def remove(self, block_hash: bytes) -> None:
        """Note that the block is not findable any more."""
        row = self._rows.pop(block_hash)
        self.untiered.discard(block_hash)
        if self._stored.pop(block_hash, None) is None:
            self._removed[block_hash] = row

    def drain(self) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
        """Return (stored, removed) and clear both."""
        changes = (self._stored, self._removed)
        self._stored, self._removed = {}, {}
        return changes

    def keep(self, hashes: Iterable[bytes]) -> None:
        """Let tiers keep those of these blocks that they were not to keep so far."""
        found = self.untiered.intersection(hashes)
        self.untiered -= found
        self._kept += found

    def drain_kept(self) -> list[bytes]:
        """Return the blocks that tiers are to keep since the last call."""
        kept, self._kept = self._kept, []
        return kept

    def rows(self) -> list[bytes]:
        """Return the rows of all registered blocks, parents before children.

        May be called from any thread: the copy is one bytecode."""
        return list(self._rows.values())
