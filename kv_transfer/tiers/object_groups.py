"""Groups of a chain's blocks, one per object of the shared store, and a node's record of which objects exist."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.kv_transfer.tiers.group_store import Changed
from kvferry.protocol.index_rows import alone
from kvferry.protocol.layout import STORE_GROUP

GROUP = STORE_GROUP
"""Number of blocks in one object."""
SUFFIX = ".kv"
KNOWN = 8192
"""Maximum number of objects that a node remembers."""
KNOWN_S = 600.0
"""Time for which a found object counts as existing, in seconds; other nodes may delete it."""
REWRITE_AGE_S = 86_400.0
"""Age beyond which an object in use is written again, in seconds, because the oldest objects are evicted first."""


@dataclass(frozen=True, slots=True)
class Group:
    """Group of consecutive blocks that one store object holds.

    start, end: positions in the chain. parent: hash of the block before the first one; empty at the beginning of a
    chain."""

    name: str
    start: int
    parent: bytes
    hashes: tuple[bytes, ...]

    @property
    def end(self) -> int:
        """Return the position behind the last block in the chain."""
        return self.start + len(self.hashes)


def in_chain(folder: str, hashes: Sequence[bytes], first: int = 0, most: int | None = None) -> Iterator[Group]:
    """Yield up to `most` complete groups of a chain, from the group of its block `first` on."""
    begin, end = first // GROUP, len(hashes) // GROUP
    for index in range(begin, end if most is None else min(end, begin + most)):
        start = index * GROUP
        part = tuple(hashes[start : start + GROUP])
        name = f"{folder}/{index:06d}-{part[-1].hex()}{SUFFIX}"
        yield Group(name, start, hashes[start - 1] if start else b"", part)


def depth_of(name: str) -> int:
    """Return the number of groups before this one in its chain, from its name."""
    number = name.rsplit("/", 1)[-1].split("-", maxsplit=1)[0]
    return int(number) if number.isdigit() else 0


def last_of(name: str) -> bytes:
    """Return the hash of the group's last block, from its name; empty if it is no group's name."""
    try:
        return bytes.fromhex(name.rsplit("-", maxsplit=1)[-1].removesuffix(SUFFIX))
    except ValueError:
        return b""


@dataclass(slots=True)
class ObjectRecord:
    """Node's knowledge of one object.

    written_at  time of the write on this process's monotonic clock; None while the object is being written
    wrong       whether its content was reported wrong
    at          time of this entry
    """

    group: Group
    written_at: float | None
    wrong: bool = False
    at: float = field(default_factory=time.monotonic)


class Known:
    """Record of the objects that this node found or wrote most recently. Thread-safe.

    changed   called with the index rows of groups that were added and removed, one row per group, in order; must not
              call back into this object
    """

    def __init__(self) -> None:
        self.changed: Changed = lambda stored, removed: None
        self._records: OrderedDict[str, ObjectRecord] = OrderedDict()
        self._lock = threading.Lock()

    def exists(self, group: Group) -> bool:
        """Return whether the object is known to exist. If False, the caller may ask the store."""
        record = self._records.get(group.name)
        return record is not None and record.written_at is not None and _is_current(record)

    def settled(self, group: Group) -> bool:
        """Return whether no write is needed: the object is being written, or was found recently and is not old."""
        record = self._records.get(group.name)
        return record is not None and (record.written_at is None or (_is_current(record) and not _old(record)))

    def begin(self, group: Group) -> bool:
        """Record the start of a write; return False if the write is unnecessary."""
        with self._lock:
            if self.settled(group):
                return False
            self._put(ObjectRecord(group, None))
            return True

    def found(self, group: Group, age_s: float) -> None:
        """Record that the object exists and was written `age_s` seconds ago."""
        with self._lock:
            record = self._records.get(group.name)
            if record is None or record.written_at is not None:
                self._put(ObjectRecord(group, time.monotonic() - age_s))
                self.changed([_row(group)], ())

    def written(self, group: Group, age_s: float = 0.0) -> bool:
        """Record that a write ended; return False if the object was reported wrong meanwhile."""
        with self._lock:
            record = self._records.get(group.name)
            if record is not None and record.wrong:
                return False
            self._put(ObjectRecord(group, time.monotonic() - age_s))
            self.changed([_row(group)], ())
            return True

    def forget(self, group: Group) -> None:
        """Record that a write failed: whether the object exists is unknown."""
        with self._lock:
            self._records.pop(group.name, None)

    def gone(self, group: Group) -> None:
        """Record that the object does not exist and is not being written."""
        with self._lock:
            self._remove(group)

    def deleted(self, names: Collection[str]) -> None:
        """Record that these objects were deleted."""
        with self._lock:
            for name in names:
                self._records.pop(name, None)
            self.changed((), [alone(last) for name in names if (last := last_of(name))])

    def missing(self, group: Group) -> None:
        """Record that the object was not found, unless it is being written."""
        with self._lock:
            record = self._records.get(group.name)
            if record is None or record.written_at is not None:
                self._remove(group)

    def rows(self) -> list[bytes]:
        """Return the rows of all existing groups."""
        with self._lock:
            return [_row(record.group) for record in self._records.values() if record.written_at is not None]

    def drop(self, hashes: Collection[bytes]) -> list[str]:
        """Forget the groups of these blocks and those behind them, since they are wrong; return their names."""
        names: list[str] = []
        with self._lock:
            wrong, found = set(hashes), True
            while found:
                found = False
                for record in list(self._records.values()):
                    if record.wrong or wrong.isdisjoint((record.group.parent, *record.group.hashes)):
                        continue
                    found = record.wrong = True
                    wrong.update(record.group.hashes)
                    if record.written_at is not None:
                        del self._records[record.group.name]
                        names.append(record.group.name)
            self.changed((), [alone(last) for name in names if (last := last_of(name))])
        return names

    def _remove(self, group: Group) -> None:
        self._records.pop(group.name, None)
        self.changed((), [_row(group)])

    def _put(self, record: ObjectRecord) -> None:
        self._records[record.group.name] = record
        self._records.move_to_end(record.group.name)
        if len(self._records) > KNOWN:
            oldest = next(iter(self._records))
            if self._records[oldest].written_at is not None:  # a write in progress removes its entry itself
                del self._records[oldest]


def _row(group: Group) -> bytes:
    """Return the index row of a group, which derives from the hash of its last block."""
    return alone(group.hashes[-1])


def _is_current(record: ObjectRecord) -> bool:
    return time.monotonic() < record.at + KNOWN_S


def _old(record: ObjectRecord) -> bool:
    return record.written_at is not None and time.monotonic() > record.written_at + REWRITE_AGE_S
