"""In-memory catalog of the KV blocks that a tier (memory, disk, object store) holds, with their eviction order.

A chain loses its end first, so that what remains still begins at the beginning."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from kvferry.protocol.index_rows import behind


class Group(Protocol):
    """Blocks of a tier that follow each other in a chain, come at once and leave at once."""

    @property
    def name(self) -> str:
        """Return a name that no other group has at the same time."""

    @property
    def parent(self) -> bytes:
        """Hash of the block before the first one, empty at the beginning of a chain."""

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """Return the hashes of its blocks, in order."""

    @property
    def size(self) -> int:
        """Bytes that it takes."""


G = TypeVar("G", bound=Group)


class Catalog(Generic[G]):
    """Not locked: anyone who changes it is alone with it. `in` may be asked from any thread.

    used   bytes of all groups
    """

    def __init__(self, groups: Iterable[G] = ()) -> None:
        """groups: those that are there, the one first that was used longest ago."""
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
        """From any thread: the copy is one bytecode."""
        return list(self._where)

    def rows(self) -> list[bytes]:
        """Return the rows of blocks whose chain is here from its beginning.

        As `hashes`."""
        return list(self._rows.values())

    def named(self, name: str) -> G | None:
        """The one of this name."""
        return self._order.get(name)

    def find(self, block_hash: bytes) -> G | None:
        """Return the group that holds a block."""
        return self._where.get(block_hash)

    def chain(self, group: G) -> Iterator[G]:
        """The group, and those in front of it; each once, whatever they say of their parents."""
        found: G | None = group
        seen: set[int] = set()
        while found is not None and id(found) not in seen:
            seen.add(id(found))
            yield found
            found = self._where.get(found.parent)

    def oldest(self) -> G | None:
        """Return the group to evict next."""
        return next(iter(self._order.values()), None)

    def enter(self, group: G) -> tuple[list[bytes], list[bytes]]:
        """It is there now, and in use.

        Rows of the blocks that came with it, and of those that went with an older group of its name."""
        old = self._order.get(group.name)
        lost = self.leave(old) if old is not None else []
        came = self._enter(group)
        self.touch(group)
        return came, [*set(lost).difference(came)]

    def touch(self, group: G) -> None:
        """It is in use, and so is what it stands behind."""
        for each in self.chain(group):
            self._order.move_to_end(each.name)

    def leave(self, group: G) -> list[bytes]:
        """Rows of its blocks, which are not there any more, and of those behind them, whose chain does not begin here
        now."""
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

    def tainted(self, hashes: Collection[bytes]) -> list[G]:
        """The groups of these blocks, and all that stand behind those."""
        found = {id(group): group for each in hashes if (group := self._where.get(each)) is not None}
        left = [*found.values(), *(group for each in hashes for group in self._behind.get(each, {}).values())]
        while left:
            group = left.pop()
            found[id(group)] = group
            behind = [far for each in group.hashes for far in self._behind.get(each, {}).values()]
            left += [far for far in behind if id(far) not in found]
        return list(found.values())

    def _cut_off(self, left: list[bytes]) -> list[bytes]:
        """Rows of these blocks and of all behind them, which have none any more."""
        cut = list[bytes]()
        for block_hash in left:  # it grows meanwhile
            if row := self._rows.pop(block_hash, b""):
                cut.append(row)
                left += [each for far in self._behind.get(block_hash, {}).values() for each in far.hashes]
        return cut

    def _enter(self, group: G) -> list[bytes]:
        """Rows of its blocks, and of those behind that were there before it; none while one before it is not there."""
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
    """Those first that leave first: each was used at least as lately as those behind it. Looks at each once."""
    placed: dict[int, G] = {}
    for group in reversed(groups):
        chain: dict[int, G] = {}
        for each in catalog.chain(group):
            if id(each) in placed or id(each) in chain:
                break
            chain[id(each)] = each
        placed.update(reversed(chain.items()))
    return list(placed.values())[::-1]
