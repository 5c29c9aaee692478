"""The files of a disk tier within their bound. What was used longest ago leaves first.

No lock is held while the file system is asked for anything: it may hang, and others ask what is here.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kv_transfer.tiers import files
from kv_transfer.tiers.catalog import Catalog
from kv_transfer.tiers.files import Group
from process.log import Seldom
from protocol.errors import BlocksCorrupt, NotFound, reason

log = logging.getLogger("kvferry.tiers")

FULL = (errno.ENOSPC, errno.EDQUOT)
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)
"""What is not the file's fault: it is kept."""

Changed = Callable[[Sequence[bytes], Sequence[bytes]], None]
"""Hashes of blocks that are here now, and of those that are not here any more."""


class Store:
    """`size` bytes at most. One thread puts and tidies, another one gets; what else there is, from any thread.

    lock      nothing enters while it is held
    changed   called on any thread, with nothing locked
    """

    def __init__(self, directory: Path, size: int, fingerprint: str, block_bytes: int, changed: Changed) -> None:
        self.directory, self._size, self._fingerprint, self._block_bytes = directory, size, fingerprint, block_bytes
        self._changed = changed
        self.lock = threading.Lock()
        self.catalog = Catalog(files.find(directory, fingerprint, block_bytes))
        self._doomed: deque[Path] = deque()
        self.trouble = Seldom(log, every_s=60.0)
        self._make_room(0)

    def put(self, hashes: Sequence[bytes], parent: bytes, blocks: Sequence[Any], right: Callable[[], bool]) -> bool:
        """As a new file. Whether it may be found: it is `right` (asked with the lock held), and what it stands behind
        is still here. Raises OSError."""
        group = self._written(hashes, parent, blocks)
        with self.lock:
            entered = right() and (not parent or parent in self.catalog)
            if entered:
                lost = self.catalog.enter(group)
            else:
                self._doomed.append(group.path)
        if entered:
            self._tell(group.hashes, lost)
        self.tidy()
        return entered

    def get(self, hashes: Sequence[bytes], blocks: Sequence[Any]) -> int:
        """How many leading ones came from the file that has the first. Raises NotFound, OSError and BlocksCorrupt; a
        file that is lost or wrong is not found any more."""
        with self.lock:
            if (group := self.catalog.find(hashes[0])) is None:
                raise NotFound("these blocks are not on disk any more")
            self.catalog.touch(group)
        first, count = group.hashes.index(hashes[0]), 0
        while count < len(hashes) and group.hashes[first + count : first + count + 1] == (hashes[count],):
            count += 1
        try:
            files.read(group, first, blocks[:count])
        except (OSError, BlocksCorrupt) as error:
            if not (isinstance(error, OSError) and error.errno in PASSING):
                with self.lock:
                    gone = self.leave([group])
                self._tell((), gone)
            raise
        with suppress(OSError):  # it may not be ours to change
            os.utime(group.path)
        return count

    def leave(self, groups: Collection[Group]) -> list[bytes]:
        """With the lock held. Hashes that are not here any more, which are still to be told; the files go when it is
        tidied."""
        gone: list[bytes] = []
        for group in groups:
            gone += self.catalog.leave(group)
            if self.catalog.file(group.path) is None:
                self._doomed.append(group.path)
        return gone

    def tidy(self) -> None:
        """Remove what left. Where files are written alone, so that none is taken for another of its name."""
        while self._doomed:
            path = self._doomed.popleft()
            if self.catalog.file(path) is not None:
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                self.trouble.warning("%s is not removed: %s", path, reason(error))

    def _written(self, hashes: Sequence[bytes], parent: bytes, blocks: Sequence[Any]) -> Group:
        """What was used longest ago makes room for it; more of that, where the disk has less than it was said to."""
        wanted = files.size_of(self._fingerprint, hashes, self._block_bytes)
        self._make_room(wanted, parent)
        try:
            return files.write(self.directory, self._fingerprint, hashes, parent, blocks)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._make_room(wanted, parent, below=self.catalog.used)
            return files.write(self.directory, self._fingerprint, hashes, parent, blocks)

    def _make_room(self, wanted: int, parent: bytes = b"", below: int | None = None) -> None:
        """For a file of so many bytes, behind that block; below: where the disk has no room for so many. Raises OSError
        where all that is left is what it stands behind."""
        room = min(self._size, self._size if below is None else below) - wanted
        gone: list[bytes] = []
        try:
            with self.lock:
                before = self.catalog.find(parent)
                if before is not None:
                    self.catalog.touch(before)
                while self.catalog.used > room or room < 0:
                    oldest = self.catalog.oldest()
                    if room < 0 or oldest is None or oldest is before:
                        raise OSError(errno.ENOSPC, "there is no room for so many blocks that follow each other")
                    gone += self.leave([oldest])
        finally:
            self.tidy()
            self._tell((), gone)

    def _tell(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        if stored or removed:
            self._changed(stored, removed)
