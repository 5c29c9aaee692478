"""Set of the blocks that an engine caches, with the index rows of those that can be reached from a chain's start."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from kvferry.engine_adapter.kv_event_batch import BlockKey
from kvferry.protocol.hashing import NO_EXTRAS, block_hash, chain
from kvferry.protocol.index_rows import behind


class _Block:
    """One cached block.

    place   its position among the blocks after its parent
    hash    kvferry's own hash, known once the block was reachable; empty: not yet
    row     its row in the block index; empty while the block before it is not cached
    tokens, extras  kept while the hash is unknown; extras: see `protocol.hashing.block_hash`"""

    __slots__ = ("copies", "extras", "hash", "key", "parent", "place", "row", "tokens")

    def __init__(self, key: BlockKey, parent: BlockKey | None) -> None:
        self.key, self.parent, self.tokens = key, parent, _NO_TOKENS
        self.copies, self.place = 1, 0
        self.hash = self.row = self.extras = b""


_NO_TOKENS = array("i")


class CachedBlocks:
    """Blocks of an engine's cache by the engine's own keys.

    block_size      tokens per block
    counts_copies   whether the engine announces and removes each copy of a block, as vLLM does; otherwise a block that
                    is announced again counts once

    A block has a row while it and all blocks before it are cached. A block whose parent is not cached waits for it.
    rows: row → number of blocks that have it, parents before children. Time per block is constant."""

    def __init__(self, block_size: int, *, counts_copies: bool = True) -> None:
        self._block_size, self._counts_copies = block_size, counts_copies
        self._blocks: dict[BlockKey, _Block] = {}
        self._behind: dict[BlockKey, list[_Block]] = {}
        self.rows: dict[bytes, int] = {}
        self.copies = 0
        self._changed: dict[bytes, bool] = {}  # rows added and removed since `changes`

    def __len__(self) -> int:
        """Return the number of distinct blocks."""
        return len(self._blocks)

    def store(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        token_ids: array[int],
        root: bytes = b"",
        extras: Mapping[int, bytes] = NO_EXTRAS,
    ) -> None:
        """Add one copy of consecutive blocks.

        root: the hash before the first one if `parent` is None. extras: of the blocks, by their place among these."""
        size = self._block_size
        above = None if parent is None else self._blocks.get(parent)
        row, before = (b"", root) if above is None else (above.row, above.hash)
        reachable = parent is None or bool(row)
        hashes = chain(before, token_ids, size, extras=extras) if reachable else ()
        for at, key in enumerate(keys):
            block = self._blocks.get(key)
            if block is not None:
                if self._counts_copies:
                    block.copies += 1
                    self.copies += 1
            else:
                block = self._add(key, parent)
                if reachable and hashes:
                    block.hash = hashes[at]
                else:
                    block.tokens, block.extras = token_ids[at * size : (at + 1) * size], extras.get(at, b"")
                if reachable:
                    self._add_rows(block, row, before)
            parent, row, before, reachable = key, block.row, block.hash, bool(block.row)

    def remove(self, key: BlockKey) -> bool:
        """Remove one copy of a block; return False if it is not known."""
        block = self._blocks.get(key)
        if block is None:
            return False
        self.copies -= 1
        block.copies -= 1
        if block.copies:
            return True
        if block.row:
            self._remove_rows(block)
        del self._blocks[key]
        if block.parent is not None:
            siblings = self._behind[block.parent]
            last = siblings.pop()
            if last is not block:
                siblings[block.place], last.place = last, block.place
            if not siblings:
                del self._behind[block.parent]
        return True

    def clear(self) -> None:
        """Remove all blocks."""
        for row in reversed(self.rows):
            self._note(row, present=False)
        self._blocks, self._behind, self.rows, self.copies = {}, {}, {}, 0

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the rows that were added since the last call, parents first, and those removed, children first."""
        added = [row for row, present in self._changed.items() if present]
        removed = [row for row, present in self._changed.items() if not present]
        self._changed = {}
        return added, removed

    def _add(self, key: BlockKey, parent: BlockKey | None) -> _Block:
        block = self._blocks[key] = _Block(key, parent)
        self.copies += 1
        if parent is not None:
            siblings = self._behind.setdefault(parent, [])
            block.place = len(siblings)
            siblings.append(block)
        return block

    def _add_rows(self, top: _Block, row_before: bytes, hash_before: bytes) -> None:
        """Give a row to a block whose parent has one, and to all cached blocks after it."""
        self._add_row(top, row_before, hash_before)
        if top.key not in self._behind:
            return
        found = [top]
        for block in found:
            for each in self._behind.get(block.key, ()):
                self._add_row(each, block.row, block.hash)
                found.append(each)

    def _add_row(self, block: _Block, row_before: bytes, hash_before: bytes) -> None:
        if not block.hash:
            block.hash = block_hash(hash_before, block.tokens, block.extras)
            block.tokens, block.extras = _NO_TOKENS, b""
        block.row = row = behind(row_before, block.hash)
        count = self.rows.get(row, 0)
        self.rows[row] = count + 1
        if not count:
            self._note(row, present=True)

    def _remove_rows(self, top: _Block) -> None:
        """Remove the row of a block, and those of all blocks after it."""
        found = [top]
        for block in found:
            found += self._behind.get(block.key, ())
        for block in reversed(found):
            self.rows[block.row] -= 1
            if not self.rows[block.row]:
                del self.rows[block.row]
                self._note(block.row, present=False)
            block.row = b""

    def _note(self, row: bytes, *, present: bool) -> None:
        """Record a change; it cancels an opposite one."""
        if self._changed.pop(row, present) is present:
            self._changed[row] = present
