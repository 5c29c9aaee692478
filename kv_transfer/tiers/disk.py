"""KV blocks on disk: what was computed here stays findable after it left the pool, and after a restart.

A directory belongs to one process at a time. What was used longest ago leaves it first.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from kv_transfer.tiers import files
from kv_transfer.tiers.files import Group
from kv_transfer.tiers.lane import Lane
from process.log import Seldom
from protocol.errors import BlocksCorrupt, ConfigError, KvferryError, NotFound, TransferFailed, reason

log = logging.getLogger("kvferry.tiers")

GROUP = 64
"""Blocks of one file at most."""
WRITES, READS = 16, 16
"""Chains that may wait to be written, or read: beyond them nothing is written, and what is asked for is computed."""
FIRST_RATE, WEIGHT = 500e6, 0.2
"""Bytes a second that a read is expected to bring before there was one, and the weight of a new one in the average."""
PLACES = 256
"""Directories below one path that are tried for a free one."""


class DiskTier:
    """Blocks of one kind in files, `size` bytes of them at most. From any thread; reads and writes have a thread each.

    dropped   called with the hashes of blocks that are not here any more, on any thread, with nothing locked
    """

    def __init__(
        self,
        directory: Path,
        size: int,
        fingerprint: str,
        block_bytes: int,
        dropped: Callable[[Collection[bytes]], None] = lambda hashes: None,
    ) -> None:
        self.directory, self._lock_file = directory, _own(directory)
        self._size, self._fingerprint, self._block_bytes = size, fingerprint, block_bytes
        self._dropped = dropped
        self._lock = threading.Lock()
        self._groups: OrderedDict[Path, Group] = OrderedDict()
        self._where: dict[bytes, tuple[Group, int]] = {}
        self._used = 0
        self._rate = FIRST_RATE
        self._trouble = Seldom(log, every_s=60.0)
        for group in files.find(directory, fingerprint, block_bytes):
            self._enter(group)
        self._make_room(0)
        self._reader, self._writer = Lane("kv-tier-read", READS), Lane("kv-tier-write", WRITES)

    def close(self) -> None:
        """Nothing is begun any more; the directory is free for another process once this one's threads have ended."""
        self._reader.close()
        self._writer.close()
        self._lock_file.close()

    @property
    def used(self) -> int:
        """Bytes of all files."""
        return self._used

    def hashes(self) -> list[bytes]:
        """Of all blocks that are here."""
        with self._lock:
            return list(self._where)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._where

    def run(self, hashes: Sequence[bytes]) -> int:
        """How many leading ones of them are here."""
        with self._lock:
            return next((index for index, each in enumerate(hashes) if each not in self._where), len(hashes))

    def seconds(self, blocks: int) -> float:
        """That reading so many is expected to take."""
        return blocks * self._block_bytes / self._rate

    def write(self, hashes: Sequence[bytes], parent: bytes, blocks: Sequence[Any], done: Callable[[int], None]) -> bool:
        """Write consecutive blocks of a chain, behind the block `parent` (empty: from its beginning). They must stay as
        they are until `done` is called, on a thread of this tier, with how many were written. False: too much waits,
        and nothing is done."""
        return self._writer.submit(lambda: self._write(list(hashes), parent, list(blocks), done))

    def read(self, hashes: Sequence[bytes], blocks: Sequence[Any], done: Callable[[KvferryError | None], None]) -> bool:
        """Read into these blocks, which belong to the tier until `done` is called, on a thread of its own, with None
        or with what went wrong. False: too much waits, and nothing is done."""
        return self._reader.submit(lambda: self._read(list(hashes), list(blocks), done))

    def drop(self, hashes: Collection[bytes]) -> None:
        """What these blocks hold is wrong: neither their files are found any more, nor those behind them."""
        gone, wrong = [], set(hashes)
        with self._lock:
            while groups := [group for group in self._groups.values() if wrong & {group.parent, *group.hashes}]:
                for group in groups:
                    wrong.update(group.hashes)
                    gone.append(self._leave(group))
        self._tell(gone)

    # The tier's own threads.

    def _write(self, hashes: list[bytes], parent: bytes, blocks: list[Any], done: Callable[[int], None]) -> None:
        written = 0
        try:
            for at in range(0, len(hashes), GROUP):
                part = slice(at, at + GROUP)
                self._make_room(files.size_of(self._fingerprint, hashes[part], self._block_bytes))
                group = files.write(self.directory, self._fingerprint, hashes[part], parent, blocks[part])
                with self._lock:
                    self._enter(group)
                written, parent = written + len(group.hashes), group.hashes[-1]
        except Exception as error:
            self._trouble.warning("blocks are not written to %s: %s", self.directory, reason(error))
        finally:
            done(written)

    def _read(self, hashes: list[bytes], blocks: list[Any], done: Callable[[KvferryError | None], None]) -> None:
        error: KvferryError | None = None
        began = time.monotonic()
        try:
            at = 0
            while at < len(hashes):
                at += self._read_group(hashes[at:], blocks[at:])
            rate = len(hashes) * self._block_bytes / max(time.monotonic() - began, 1e-6)
            self._rate += WEIGHT * (rate - self._rate)
        except Exception as caught:
            error = caught if isinstance(caught, KvferryError) else TransferFailed(reason(caught))
            self._trouble.warning("blocks are not read from %s: %s", self.directory, error)
        finally:
            done(error)

    def _read_group(self, hashes: Sequence[bytes], blocks: Sequence[Any]) -> int:
        """How many leading ones came from the file that has the first. One that cannot be read is removed."""
        with self._lock:
            if hashes[0] not in self._where:
                raise NotFound("these blocks are not on disk any more")
            group, first = self._where[hashes[0]]
            self._groups.move_to_end(group.path)
        count = 0
        while count < len(hashes) and group.hashes[first + count : first + count + 1] == (hashes[count],):
            count += 1
        try:
            files.read(group, first, blocks[:count])
            os.utime(group.path)
        except (OSError, BlocksCorrupt):
            with self._lock:
                gone = self._leave(group) if self._groups.get(group.path) is group else []
            self._tell([gone])
            raise
        return count

    def _make_room(self, wanted: int) -> None:
        """For a file of so many bytes. Raises OSError if the tier is smaller than that."""
        if wanted > self._size:
            raise OSError(f"a file of {wanted} bytes is larger than the tier")
        gone = []
        with self._lock:
            while self._used + wanted > self._size:
                gone.append(self._leave(next(iter(self._groups.values()))))
        self._tell(gone)

    # With the lock held.

    def _enter(self, group: Group) -> None:
        if (old := self._groups.pop(group.path, None)) is not None:
            self._used -= old.size
            self._lose(old)
        self._groups[group.path] = group
        self._used += group.size
        for index, block_hash in enumerate(group.hashes):
            self._where[block_hash] = (group, index)

    def _leave(self, group: Group) -> list[bytes]:
        """Its file is removed; returned are the hashes that are not here any more."""
        del self._groups[group.path]
        self._used -= group.size
        try:
            group.path.unlink(missing_ok=True)
        except OSError as error:
            self._trouble.warning("%s is not removed: %s", group.path, reason(error))
        return self._lose(group)

    def _lose(self, group: Group) -> list[bytes]:
        """Those of its hashes that no other file has."""
        gone = [each for each in group.hashes if each in self._where and self._where[each][0] is group]
        for block_hash in gone:
            del self._where[block_hash]
        return gone

    def _tell(self, gone: list[list[bytes]]) -> None:
        for hashes in gone:
            self._dropped(hashes)


def place(path: Path, name: str, fingerprint: str) -> Iterator[Path]:
    """Directories for the blocks of such nodes below a path, one for each process that may be there."""
    kind = path / hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
    return (kind / f"{name}-{number}" for number in range(PLACES))


def open_disk(path: str, name: str, size: int, fingerprint: str, block_bytes: int, **how: Any) -> DiskTier:
    """The first tier below the path that no other process has: after a restart it is found again. Raises
    ConfigError."""
    for directory in place(Path(path).expanduser(), name, fingerprint):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return DiskTier(directory, size, fingerprint, block_bytes, **how)
        except BlockingIOError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot keep blocks in {directory}: {reason(error)}", param="kv_disk_path") from error
    raise ConfigError(f"{PLACES} processes keep blocks below {path}", param="kv_disk_path")


def _own(directory: Path) -> IO[bytes]:
    """Raises BlockingIOError where another process has it."""
    file = (directory / "lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file
