"""Grouping of a chain's blocks into store objects, and the node's knowledge of existing objects."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.kv_transfer.tiers.store import Changed
from kvferry.protocol.index_rows import alone
from kvferry.protocol.layout import STORE_GROUP

GROUP = STORE_GROUP
"""Blocks of one object."""
SUFFIX = ".kv"
KNOWN = 8192
"""Objects that a node remembers, those that it met last."""
SURE_S = 600.0
"""For which an object counts as there that was met: others may delete it."""
ANEW_S = 86_400.0
"""After which what is in use is written anew: what was written longest ago leaves first."""


@dataclass(frozen=True, slots=True)
class Group:
    """start, end: of its blocks in their chain; parent: hash of the block before the first one, empty at the beginning
    of a chain."""

    name: str
    start: int
    parent: bytes
    hashes: tuple[bytes, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.hashes)


def in_chain(folder: str, hashes: Sequence[bytes], first: int = 0, most: int | None = None) -> Iterator[Group]:
    """The whole groups of a chain from the one of its block `first` on, so many at most."""
    begin, end = first // GROUP, len(hashes) // GROUP
    for index in range(begin, end if most is None else min(end, begin + most)):
        start = index * GROUP
        part = tuple(hashes[start : start + GROUP])
        name = f"{folder}/{index:06d}-{part[-1].hex()}{SUFFIX}"
        yield Group(name, start, hashes[start - 1] if start else b"", part)


def depth_of(name: str) -> int:
    """Return how many groups of its chain precede the one of this name."""
    number = name.rsplit("/", 1)[-1].split("-", maxsplit=1)[0]
    return int(number) if number.isdigit() else 0


def last_of(name: str) -> bytes:
    """Hash of the last block of the group of this name; empty: it is no group's."""
    try:
        return bytes.fromhex(name.rsplit("-", maxsplit=1)[-1].removesuffix(SUFFIX))
    except ValueError:
        return b""


@dataclass(slots=True)
class Met:
    """written_at: by this process's monotonic clock; None: it is being written."""

    group: Group
    written_at: float | None
    wrong: bool = False
    at: float = field(default_factory=time.monotonic)


class Known:
    """The objects that a node met last. From any thread.

    changed   told of groups that are there now or not any more, by the row that stands for each, in the order in which
              that became known; it asks nothing of this
    """

    def __init__(self) -> None:
        self.changed: Changed = lambda stored, removed: None
        self._met: OrderedDict[str, Met] = OrderedDict()
        self._lock = threading.Lock()

    def there(self, group: Group) -> bool:
        """Return whether it is there as far as is known; False: who asks may find it."""
        met = self._met.get(group.name)
        return met is not None and met.written_at is not None and _sure(met)

    def settled(self, group: Group) -> bool:
        """Return whether it is being written, or was there of late, and not written long ago."""
        met = self._met.get(group.name)
        return met is not None and (met.written_at is None or (_sure(met) and not _old(met)))

    def begin(self, group: Group) -> bool:
        """It is to be written. False: it need not be."""
        with self._lock:
            if self.settled(group):
                return False
            self._enter(Met(group, None))
            return True

    def found(self, group: Group, age_s: float) -> None:
        """It is there, written so long ago."""
        with self._lock:
            met = self._met.get(group.name)
            if met is None or met.written_at is not None:
                self._enter(Met(group, time.monotonic() - age_s))
                self.changed([_row(group)], ())

    def written(self, group: Group, age_s: float = 0.0) -> bool:
        """Record that a write ended; return False if the object was reported wrong meanwhile.

        False: it is wrong, as was told meanwhile."""
        with self._lock:
            met = self._met.get(group.name)
            if met is not None and met.wrong:
                return False
            self._enter(Met(group, time.monotonic() - age_s))
            self.changed([_row(group)], ())
            return True

    def forget(self, group: Group) -> None:
        """It is not written any more, and may be there or not."""
        with self._lock:
            self._met.pop(group.name, None)

    def gone(self, group: Group) -> None:
        """It is not there, nor being written."""
        with self._lock:
            self._leave(group)

    def deleted(self, names: Collection[str]) -> None:
        """These objects are not there any more."""
        with self._lock:
            for name in names:
                self._met.pop(name, None)
            self.changed((), [alone(last) for name in names if (last := last_of(name))])

    def missing(self, group: Group) -> None:
        """It is not there, unless it is being written."""
        with self._lock:
            met = self._met.get(group.name)
            if met is None or met.written_at is not None:
                self._leave(group)

    def rows(self) -> list[bytes]:
        """Return the rows of all existing groups."""
        with self._lock:
            return [_row(met.group) for met in self._met.values() if met.written_at is not None]

    def drop(self, hashes: Collection[bytes]) -> list[str]:
        """Forget the groups of these blocks and those behind them, since they are wrong; return their names."""
        names: list[str] = []
        with self._lock:
            wrong, found = set(hashes), True
            while found:
                found = False
                for met in list(self._met.values()):
                    if met.wrong or wrong.isdisjoint((met.group.parent, *met.group.hashes)):
                        continue
                    found = met.wrong = True
                    wrong.update(met.group.hashes)
                    if met.written_at is not None:
                        del self._met[met.group.name]
                        names.append(met.group.name)
            self.changed((), [alone(last) for name in names if (last := last_of(name))])
        return names

    def _leave(self, group: Group) -> None:
        self._met.pop(group.name, None)
        self.changed((), [_row(group)])

    def _enter(self, met: Met) -> None:
        self._met[met.group.name] = met
        self._met.move_to_end(met.group.name)
        if len(self._met) > KNOWN:
            oldest = next(iter(self._met))
            if self._met[oldest].written_at is not None:  # what is being written ends by itself
                del self._met[oldest]


def _row(group: Group) -> bytes:
    """By the hash of its last block."""
    return alone(group.hashes[-1])


def _sure(met: Met) -> bool:
    return time.monotonic() < met.at + SURE_S


def _old(met: Met) -> bool:
    return met.written_at is not None and time.monotonic() > met.written_at + ANEW_S
