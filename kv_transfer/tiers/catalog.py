"""In-memory LRU catalog of the KV blocks that a local tier (host memory or disk) holds, in groups of a chain.

A chain is evicted from its end, so that the remaining blocks are still a prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from kvferry.protocol.index_rows import behind


class Group(Protocol):
    """Consecutive blocks of a chain, which enter and leave a tier together."""

    @property
    def name(self) -> str:
        """Return the group's name, unique among the groups of a tier."""

    @property
    def parent(self) -> bytes:
        """Return the hash of the block before the first one; empty at the beginning of a chain."""

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """Return the hashes of its blocks, in order."""

    @property
    def size(self) -> int:
        """Return the bytes that it occupies."""


G = TypeVar("G", bound=Group)


class Catalog(Generic[G]):
    """LRU catalog of groups, by block hash. Not thread-safe for writes; `in` may be called from any thread.

    Only blocks whose chain is here from its beginning have index rows (`protocol.index_rows`).

    used   bytes of all groups
    """

    def __init__(self, groups: Iterable[G] = ()) -> None:
        """Start with existing groups, least recently used first."""
        self.used = 0
        self._order: OrderedDict[str, G] = OrderedDict()
        self._where: dict[bytes, G] = {}
        self._rows: dict[bytes, bytes] = {}
        self._behind: dict[bytes, dict[int, G]] = {}
        for group in (found := list(groups)):
            self._enter(group)
        for group in _in_order(self, found):
            self._order.move_to_end(group.name)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._where

    def __len__(self) -> int:
        return len(self._where)

    def hashes(self) -> list[bytes]:
        """Return the hashes of all blocks. Thread-safe: the copy is one bytecode."""
        return list(self._where)

    def rows(self) -> list[bytes]:
        """Return the rows of blocks whose chain is here from its beginning. Thread-safe, like `hashes`."""
        return list(self._rows.values())

    def named(self, name: str) -> G | None:
        """Return the group with this name, or None."""
        return self._order.get(name)

    def find(self, block_hash: bytes) -> G | None:
        """Return the group that holds a block, or None."""
        return self._where.get(block_hash)

    def chain(self, group: G) -> Iterator[G]:
        """Yield the group and its predecessors in the chain, each once even if their parents form a cycle."""
        found: G | None = group
        seen: set[int] = set()
        while found is not None and id(found) not in seen:
            seen.add(id(found))
            yield found
            found = self._where.get(found.parent)

    def oldest(self) -> G | None:
        """Return the group to evict next, or None."""
        return next(iter(self._order.values()), None)

    def enter(self, group: G) -> tuple[list[bytes], list[bytes]]:
        """Add a group as most recently used; return the rows that were added and those that were removed.

        Rows are removed with an older group of the same name."""
        old = self._order.get(group.name)
        lost = self.leave(old) if old is not None else []
        came = self._enter(group)
        self.touch(group)
        return came, [*set(lost).difference(came)]

    def touch(self, group: G) -> None:
        """Mark the group and its predecessors as most recently used."""
        for each in self.chain(group):
            self._order.move_to_end(each.name)

    def leave(self, group: G) -> list[bytes]:
        """Remove a group; return the removed rows: its own and those of blocks behind it.

        The chain of those blocks is no longer complete here."""
        if self._order.get(group.name) is not group:
            return []
        del self._order[group.name]
        self.used -= group.size
        beside = self._behind[group.parent]
        del beside[id(group)]
        if not beside:
            del self._behind[group.parent]
        gone = [each for each in group.hashes if self._where.get(each) is group]
        for block_hash in gone:
            del self._where[block_hash]
        return self._cut_off(gone)

    def with_descendants(self, hashes: Collection[bytes]) -> list[G]:
        """Return the groups of these blocks and all groups behind them."""
        found = {id(group): group for each in hashes if (group := self._where.get(each)) is not None}
        left = [*found.values(), *(group for each in hashes for group in self._behind.get(each, {}).values())]
        while left:
            group = left.pop()
            found[id(group)] = group
            behind = [far for each in group.hashes for far in self._behind.get(each, {}).values()]
            left += [far for far in behind if id(far) not in found]
        return list(found.values())

    def _cut_off(self, left: list[bytes]) -> list[bytes]:
        """Remove and return the rows of these blocks and of all blocks behind them."""
        cut = list[bytes]()
        for block_hash in left:  # the loop body appends to it
            if row := self._rows.pop(block_hash, b""):
                cut.append(row)
                left += [each for far in self._behind.get(block_hash, {}).values() for each in far.hashes]
        return cut

    def _enter(self, group: G) -> list[bytes]:
        """Add a group; return the rows of its blocks and of blocks already here behind them.

        No block has a row if the chain before the group is incomplete."""
        self._order[group.name] = group
        self.used += group.size
        self._behind.setdefault(group.parent, {})[id(group)] = group
        self._where.update(dict.fromkeys(group.hashes, group))
        came, left = list[bytes](), [group]
        while left:
            each = left.pop()
            row = self._rows.get(each.parent, b"")
            if each.parent and not row:
                continue
            for block_hash in each.hashes:
                row = self._rows.get(block_hash) or behind(row, block_hash)
                if block_hash in self._where:
                    self._rows[block_hash] = row
                    came.append(row)
                left += [far for far in self._behind.get(block_hash, {}).values() if far.hashes[0] not in self._rows]
        return came


def _in_order(catalog: Catalog[G], groups: list[G]) -> list[G]:
    """Return the groups in eviction order: each counts as used at least as recently as those behind it.

    Visits each group once."""
    placed: dict[int, G] = {}
    for group in reversed(groups):
        chain: dict[int, G] = {}
        for each in catalog.chain(group):
            if id(each) in placed or id(each) in chain:
                break
            chain[id(each)] = each
        placed.update(reversed(chain.items()))
    return list(placed.values())[::-1]
