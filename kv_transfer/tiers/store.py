"""Bounded store of a tier's groups with LRU eviction.

No lock is held while what they lie in is asked for anything: a file system may hang, and others ask what is here.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol

from kvferry.kv_transfer.tiers.catalog import Catalog, G
from kvferry.protocol.errors import BlocksCorrupt, NotFound, reason
from kvferry.runtime.log import RateLimitedLog

log = logging.getLogger("kvferry.tiers")

FULL = (errno.ENOSPC, errno.EDQUOT)
PASSING = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR),
    *(errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.ESTALE),
)
"""What is not the file's fault: it is kept."""

Changed = Callable[[Sequence[bytes], Sequence[bytes]], None]
"""Rows (`protocol.index_rows`) of blocks that are here now, and of those that are not here any more."""


class Backing(Protocol[G]):
    """Storage behind a tier's groups.

    One thread writes and removes, another one reads. blocks: of the pool, as the backing reaches them. All but
    `size_of` raise OSError.

    most   blocks of a group
    """

    most: int

    def __str__(self) -> str:
        """For a person."""

    def find(self) -> Iterable[G]:
        """Return the existing groups, least recently used first."""

    def size_of(self, hashes: Sequence[bytes]) -> int:
        """Bytes that a group of these blocks takes, at most."""

    def write(self, hashes: Sequence[bytes], parent: bytes, blocks: Sequence[Any]) -> G:
        """Write a new group; nothing is left of it where this raises."""

    def read(self, group: G, first: int, blocks: Sequence[Any]) -> None:
        """Into these what the group has from its block `first` on.

        Raises BlocksCorrupt for what is not as it was written."""

    def used(self, group: G) -> None:
        """It was read."""

    def remove(self, group: G) -> None:
        """It is not there any more, nor an error if it was not."""


class Store(Generic[G]):
    """`size` bytes at most. One thread puts and tidies, another one gets; what else there is, from any thread.

    lock      nothing enters while it is held
    changed   called on any thread, with the lock held: what is told has the order in which it came about. It asks
              nothing of the store
    """

    def __init__(self, backing: Backing[G], size: int, changed: Changed) -> None:
        self._backing, self._size, self._changed = backing, size, changed
        self.lock = threading.Lock()
        self.catalog = Catalog(backing.find())
        self._doomed: deque[G] = deque()
        self._stuck: deque[G] = deque()  # that could not be removed: they still take their room
        self.trouble = RateLimitedLog(log, every_s=60.0)
        with suppress(OSError):  # it writes nothing until there is room
            self._make_room(0)

    def put(self, hashes: Sequence[bytes], parent: bytes, blocks: Sequence[Any], right: Callable[[], bool]) -> bool:
        """Store a new group; return whether it may be found.

        Whether it may be found: it is `right` (asked with the lock held), and what it stands behind is still here.
        Raises OSError."""
        group = self._written(hashes, parent, blocks)
        with self.lock:
            entered = right() and (not parent or parent in self.catalog)
            if entered:
                self._tell(*self.catalog.enter(group))
            else:
                self._doomed.append(group)
        self.tidy()
        return entered

    def get(self, hashes: Sequence[bytes], blocks: Sequence[Any]) -> int:
        """Read blocks from the group that has the first one; return how many leading ones it held.

        Raises NotFound, OSError and BlocksCorrupt; a group that is lost or wrong is not found any more."""
        with self.lock:
            if (group := self.catalog.find(hashes[0])) is None:
                raise NotFound(f"these blocks are not in {self._backing} any more")
            self.catalog.touch(group)
        first, count = group.hashes.index(hashes[0]), 0
        while count < len(hashes) and group.hashes[first + count : first + count + 1] == (hashes[count],):
            count += 1
        try:
            self._backing.read(group, first, blocks[:count])
        except (OSError, BlocksCorrupt) as error:
            if not (isinstance(error, OSError) and error.errno in PASSING):
                with self.lock:
                    self.leave([group])
            raise
        with suppress(OSError):  # it may not be ours to change
            self._backing.used(group)
        return count

    def leave(self, groups: Collection[G]) -> None:
        """With the lock held. They are not found any more, and go when it is tidied."""
        gone: list[bytes] = []
        for group in groups:
            gone += self.catalog.leave(group)
            if self.catalog.named(group.name) is None:
                self._doomed.append(group)
        self._tell((), gone)

    def tidy(self) -> None:
        """Remove what left, and what could not be removed before, up to the first that still cannot.

        Where groups are written alone, so that none is taken for another of its name."""
        while self._stuck and self._removed(self._stuck.popleft()):
            pass
        while self._doomed:
            self._removed(self._doomed.popleft())

    def _removed(self, group: G) -> bool:
        """Return whether it is not there any more."""
        if self.catalog.named(group.name) is not None:
            return True
        try:
            self._backing.remove(group)
        except OSError as error:
            self._stuck.append(group)
            self.trouble.warning("%s is not removed from %s: %s", group.name, self._backing, reason(error))
            return False
        return True

    def _written(self, hashes: Sequence[bytes], parent: bytes, blocks: Sequence[Any]) -> G:
        """What was used longest ago makes room for it; more of that, where there is less room than was said."""
        wanted = self._backing.size_of(hashes)
        self._make_room(wanted, parent)
        try:
            return self._backing.write(hashes, parent, blocks)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._make_room(wanted, parent, below=self.catalog.used)
            return self._backing.write(hashes, parent, blocks)

    def _make_room(self, wanted: int, parent: bytes = b"", below: int | None = None) -> None:
        """For a group of so many bytes, behind that block; below: where there is no room for so many.

        Raises OSError where all that is left is what it stands behind, or cannot be removed."""
        self.tidy()
        self._require_removed(wanted, below)
        room = min(self._size, self._size if below is None else below) - wanted
        try:
            with self.lock:
                before = self.catalog.find(parent)
                if before is not None:
                    self.catalog.touch(before)
                while self.catalog.used > room or room < 0:
                    oldest = self.catalog.oldest()
                    if room < 0 or oldest is None or oldest is before:
                        raise OSError(errno.ENOSPC, "there is no room for so many blocks that follow each other")
                    self.leave([oldest])
        finally:
            self.tidy()
        self._require_removed(wanted, below)

    def _require_removed(self, wanted: int, below: int | None) -> None:
        """Raises OSError where what cannot be removed takes the room of so many bytes, or any where there is none:
        nothing else leaves for it."""
        stuck = sum(group.size for group in self._stuck)
        if stuck and (below is not None or self.catalog.used + stuck + wanted > self._size):
            raise OSError(errno.ENOSPC, "there is no room while what left cannot be removed")

    def _tell(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        if stored or removed:
            self._changed(stored, removed)
