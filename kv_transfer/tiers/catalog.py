"""Which blocks are in which files of a tier, and which file leaves next: of a chain those behind before those in front,
so that what is left of it begins at its beginning."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from kv_transfer.tiers.files import Group


class Catalog:
    """Not locked: whoever changes it is alone with it. `in` may be asked from any thread.

    used   bytes of all files
    """

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        """groups: those that are there, the one first that was used longest ago."""
        self.used = 0
        self._order: OrderedDict[Path, Group] = OrderedDict()
        self._where: dict[bytes, Group] = {}
        self._behind: dict[bytes, dict[int, Group]] = {}
        for group in (found := list(groups)):
            self._enter(group)
        for group in _in_order(self, found):
            self._order.move_to_end(group.path)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._where

    def __len__(self) -> int:
        return len(self._where)

    def hashes(self) -> list[bytes]:
        """From any thread: the copy is one bytecode."""
        return list(self._where)

    def file(self, path: Path) -> Group | None:
        """The one of this name."""
        return self._order.get(path)

    def find(self, block_hash: bytes) -> Group | None:
        """Which file has it."""
        return self._where.get(block_hash)

    def chain(self, group: Group) -> Iterator[Group]:
        """The file, and those in front of it; each once, whatever their headers say."""
        found: Group | None = group
        seen: set[int] = set()
        while found is not None and id(found) not in seen:
            seen.add(id(found))
            yield found
            found = self._where.get(found.parent)

    def oldest(self) -> Group | None:
        """Which leaves next."""
        return next(iter(self._order.values()), None)

    def enter(self, group: Group) -> list[bytes]:
        """It is there now, and in use. Hashes of blocks that went with an older file of its name."""
        old = self._order.get(group.path)
        lost = self.leave(old) if old is not None else []
        self._enter(group)
        self.touch(group)
        return [each for each in lost if each not in self._where]

    def touch(self, group: Group) -> None:
        """It is in use, and so is what it stands behind."""
        for each in self.chain(group):
            self._order.move_to_end(each.path)

    def leave(self, group: Group) -> list[bytes]:
        """Hashes of its blocks, which are not there any more."""
        if self._order.get(group.path) is not group:
            return []
        del self._order[group.path]
        self.used -= group.size
        beside = self._behind[group.parent]
        del beside[id(group)]
        if not beside:
            del self._behind[group.parent]
        gone = [each for each in group.hashes if self._where.get(each) is group]
        for block_hash in gone:
            del self._where[block_hash]
        return gone

    def tainted(self, hashes: Collection[bytes]) -> list[Group]:
        """The files of these blocks, and all that stand behind those."""
        found = {id(group): group for each in hashes if (group := self._where.get(each)) is not None}
        left = [*found.values(), *(group for each in hashes for group in self._behind.get(each, {}).values())]
        while left:
            group = left.pop()
            found[id(group)] = group
            behind = [far for each in group.hashes for far in self._behind.get(each, {}).values()]
            left += [far for far in behind if id(far) not in found]
        return list(found.values())

    def _enter(self, group: Group) -> None:
        self._order[group.path] = group
        self.used += group.size
        self._behind.setdefault(group.parent, {})[id(group)] = group
        self._where.update(dict.fromkeys(group.hashes, group))


def _in_order(catalog: Catalog, groups: list[Group]) -> list[Group]:
    """Those first that leave first: each was used at least as lately as those behind it. Looks at each once."""
    placed: dict[int, Group] = {}
    for group in reversed(groups):
        chain: dict[int, Group] = {}
        for each in catalog.chain(group):
            if id(each) in placed or id(each) in chain:
                break
            chain[id(each)] = each
        placed.update(reversed(chain.items()))
    return list(placed.values())[::-1]
