"""Bounded LRU store of a local tier's groups of blocks, over a backing (host memory or files) that holds their bytes.

No lock is held during I/O, because a file system may hang while other threads look up what the tier holds."""

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
"""Error numbers that are not the file's fault: the group is kept."""

Changed = Callable[[Sequence[bytes], Sequence[bytes]], None]
"""Callback with the rows (`protocol.index_rows`) of blocks that were added, and of those that were removed."""


class Backing(Protocol[G]):
    """Storage behind a tier's groups.

    One thread writes and removes, another one reads. blocks: blocks of the pool, in the form that the backing accesses.
    All methods but `size_of` raise OSError.

    most   maximum number of blocks in a group
    """

    most: int

    def __str__(self) -> str:
        """Return a name for log messages."""

    def find(self) -> Iterable[G]:
        """Return the existing groups, least recently used first."""

    def size_of(self, hashes: Sequence[bytes]) -> int:
        """Return the maximum size in bytes of a group of these blocks."""

    def write(self, hashes: Sequence[bytes], parent: bytes, blocks: Sequence[Any]) -> G:
        """Write a new group; leave nothing behind on an error."""

    def read(self, group: G, first: int, blocks: Sequence[Any]) -> None:
        """Read blocks of the group, from its block `first` on, into these blocks.

        Raises BlocksCorrupt if their content is corrupt."""

    def used(self, group: G) -> None:
        """Record that the group was read."""

    def remove(self, group: G) -> None:
        """Remove the group; do nothing if it does not exist."""


class Store(Generic[G]):
    """Groups of at most `size` bytes.

    One thread calls `put` and `remove_evicted`, another `get`; other methods are thread-safe.

    lock      guards the catalog; no group is added while it is held
    changed   called on any thread with the lock held, so in the order of the changes; must not call back into the store
    """

    def __init__(self, backing: Backing[G], size: int, changed: Changed) -> None:
        self._backing, self._size, self._changed = backing, size, changed
        self.lock = threading.Lock()
        self.catalog = Catalog(backing.find())
        self._evicted: deque[G] = deque()
        self._unremovable: deque[G] = deque()  # removal failed: they still occupy their bytes
        self.warnings = RateLimitedLog(log, every_s=60.0)
        with suppress(OSError):  # put tries again before every write
            self._make_room(0)

    def put(self, hashes: Sequence[bytes], parent: bytes, blocks: Sequence[Any], right: Callable[[], bool]) -> bool:
        """Store a new group; return whether it may be found.

        It may be found if `right` (called with the lock held) returns True and the parent is still here. Raises
        OSError."""
        group = self._written(hashes, parent, blocks)
        with self.lock:
            entered = right() and (not parent or parent in self.catalog)
            if entered:
                self._report(*self.catalog.enter(group))
            else:
                self._evicted.append(group)
        self.remove_evicted()
        return entered

    def get(self, hashes: Sequence[bytes], blocks: Sequence[Any]) -> int:
        """Read blocks from the group that has the first one; return how many leading blocks it held.

        Raises NotFound, OSError or BlocksCorrupt; a lost or corrupt group is removed from the catalog."""
        with self.lock:
            if (group := self.catalog.find(hashes[0])) is None:
                raise NotFound(f"these blocks are no longer in {self._backing}")
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
        with suppress(OSError):  # another user's file cannot be touched
            self._backing.used(group)
        return count

    def leave(self, groups: Collection[G]) -> None:
        """Remove groups from the catalog; `remove_evicted` removes their storage. Call it with the lock held."""
        gone: list[bytes] = []
        for group in groups:
            gone += self.catalog.leave(group)
            if self.catalog.named(group.name) is None:
                self._evicted.append(group)
        self._report((), gone)

    def remove_evicted(self) -> None:
        """Remove the storage of evicted groups, and retry earlier failures until one fails again.

        Call it only on the writing thread, so that a group is not mistaken for a new one with the same name."""
        while self._unremovable and self._removed(self._unremovable.popleft()):
            pass
        while self._evicted:
            self._removed(self._evicted.popleft())

    def _removed(self, group: G) -> bool:
        """Remove a group's storage; return False if that fails."""
        if self.catalog.named(group.name) is not None:
            return True
        try:
            self._backing.remove(group)
        except OSError as error:
            self._unremovable.append(group)
            self.warnings.warning("%s could not be removed from %s: %s", group.name, self._backing, reason(error))
            return False
        return True

    def _written(self, hashes: Sequence[bytes], parent: bytes, blocks: Sequence[Any]) -> G:
        """Write a group after evicting old ones; evict more if the storage is full before `size`."""
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
        """Evict groups until `wanted` bytes are free. Raises OSError if that is impossible.

        parent: its group is not evicted. below: upper bound of usable bytes, if the storage was full at that size."""
        self.remove_evicted()
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
                        raise OSError(errno.ENOSPC, "there is no room for a chain of this many blocks")
                    self.leave([oldest])
        finally:
            self.remove_evicted()
        self._require_removed(wanted, below)

    def _require_removed(self, wanted: int, below: int | None) -> None:
        """Raise OSError if groups that cannot be removed occupy the wanted bytes: evicting others would not help."""
        occupied = sum(group.size for group in self._unremovable)
        if occupied and (below is not None or self.catalog.used + occupied + wanted > self._size):
            raise OSError(errno.ENOSPC, "there is no room while evicted blocks cannot be deleted")

    def _report(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        if stored or removed:
            self._changed(stored, removed)
