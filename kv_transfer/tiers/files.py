"""Files of the disk tier: each holds consecutive blocks of a chain behind a header with hashes and checksums.

A file gets its final name only when it is complete. It is not synced to the device: if the machine crashes, the length
or checksums reveal a damaged file, and its blocks are computed again."""

from __future__ import annotations

import logging
import os
import stat
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvferry.kv_transfer.checksum import checksum
from kvferry.kv_transfer.tiers import block_header
from kvferry.kv_transfer.tiers.staging import Copies, Staging, at_once
from kvferry.protocol.errors import BlocksCorrupt, reason

log = logging.getLogger("kvferry.tiers")

SUFFIX, UNFINISHED = ".kv", ".part"
MAX_BLOCKS = 64
"""Maximum number of blocks in one file."""


@dataclass(frozen=True, slots=True)
class Group:
    """One complete file.

    parent        hash of the block before the first one; empty at the beginning of a chain
    hashes, sums  hash and checksum of each block, in order
    start         offset of the first block, in bytes
    """

    path: Path
    parent: bytes
    hashes: tuple[bytes, ...]
    sums: array[int]
    start: int
    block_bytes: int

    @property
    def name(self) -> str:
        """Return the file's name."""
        return self.path.name

    @property
    def size(self) -> int:
        """Return the file's size in bytes."""
        return self.start + len(self.hashes) * self.block_bytes


class Folder:
    """Block files of one directory. Implements kv_transfer.tiers.group_store.Backing."""

    def __init__(self, directory: Path, fingerprint: str, block_bytes: int, copies: Copies | None) -> None:
        """Open the directory.

        copies: copies blocks between device and host; None for blocks in host memory. Raises MemoryError."""
        self._directory, self._fingerprint, self._block_bytes = directory, fingerprint, block_bytes
        self.most = at_once(block_bytes, MAX_BLOCKS) if copies else MAX_BLOCKS
        self._out, self._in = Staging(copies, self.most), Staging(copies, self.most)

    def __str__(self) -> str:
        return str(self._directory)

    def find(self) -> Iterator[Group]:
        return find(self._directory, self._fingerprint, self._block_bytes)

    def size_of(self, hashes: Sequence[bytes]) -> int:
        return size_of(self._fingerprint, hashes, self._block_bytes)

    def write(self, hashes: Sequence[bytes], parent: bytes, blocks: Sequence[Any]) -> Group:
        return write(self._directory, self._fingerprint, hashes, parent, self._out.brought(blocks))

    def read(self, group: Group, first: int, blocks: Sequence[Any]) -> None:
        for at in range(0, len(blocks), self.most):
            part = blocks[at : at + self.most]
            read(group, first + at, self._in.to_fill(part))
            self._in.filled(part)

    def used(self, group: Group) -> None:
        """Set the file's modification time, so that a restart finds the files in LRU order."""
        os.utime(group.path)

    def remove(self, group: Group) -> None:
        group.path.unlink(missing_ok=True)


def size_of(fingerprint: str, hashes: Sequence[bytes], block_bytes: int) -> int:
    """Return the maximum size in bytes of a file of these blocks."""
    return (
        len(block_header.packed(fingerprint, block_bytes, hashes[0], hashes, [2**63 - 1] * len(hashes)))
        + len(hashes) * block_bytes
    )


def write(directory: Path, fingerprint: str, hashes: Sequence[bytes], parent: bytes, blocks: Sequence[Any]) -> Group:
    """Write a new file of blocks (contiguous bytes of equal length), readable only by its owner.

    Raises OSError; then no file is left."""
    block_bytes = memoryview(blocks[0]).nbytes
    sums = array("q", (checksum(block) for block in blocks))
    lead = block_header.packed(fingerprint, block_bytes, parent, hashes, sums)
    group = Group(directory / (hashes[-1].hex() + SUFFIX), parent, tuple(hashes), sums, len(lead), block_bytes)
    unfinished = group.path.with_suffix(UNFINISHED)
    try:
        with open(unfinished, "wb", opener=_private) as file:
            for part in (lead, *blocks):
                file.write(part)
        unfinished.replace(group.path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise
    return group


def read(group: Group, first: int, blocks: Sequence[Any]) -> None:
    """Read blocks of a file, from its block `first` on, into writable contiguous buffers.

    Raises OSError, or BlocksCorrupt if a block is corrupt."""
    with _opened(group.path) as file:
        file.seek(group.start + first * group.block_bytes)
        for index, block in enumerate(blocks, first):
            view = memoryview(block).cast("B")
            if _fill(file, view) < len(view) or checksum(block) != group.sums[index]:
                raise BlocksCorrupt(f"block {index} of {group.path.name} is corrupt")


def find(directory: Path, fingerprint: str, block_bytes: int) -> Iterator[Group]:
    """Yield the complete files of this kind, least recently used first.

    Invalid and unfinished files are removed; directories and unreadable files stay. Raises OSError if the directory
    itself cannot be read."""
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries if entry.name.endswith((SUFFIX, UNFINISHED))]
    seen: list[tuple[int, Path]] = []
    for name in names:
        path = directory / name
        try:
            status = path.lstat()
            if name.endswith(SUFFIX) and stat.S_ISREG(status.st_mode):
                seen.append((status.st_mtime_ns, path))
            elif not stat.S_ISDIR(status.st_mode):
                path.unlink()
        except OSError as error:
            log.warning("ignoring %s: %s", path, reason(error))
    for _, path in sorted(seen):
        try:
            group = _describe(path, fingerprint, block_bytes)
            if group is None:
                path.unlink()
        except OSError as error:
            log.warning("ignoring %s: %s", path, reason(error))
        else:
            if group is not None:
                yield group


def _describe(path: Path, fingerprint: str, block_bytes: int) -> Group | None:
    """Return the group of a file; None if the file is incomplete or of another kind."""
    with _opened(path) as file:
        lead = file.read(block_header.PAGE)
        length = block_header.length(lead)
        if length is not None and len(lead) < length:
            lead += file.read(length - len(lead))
        size = os.fstat(file.fileno()).st_size
    header = block_header.unpacked(lead, fingerprint, block_bytes)
    if header is None:
        return None
    group = Group(path, header.parent, header.hashes, header.sums, header.start, block_bytes)
    return group if size == group.size else None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _opened(path: Path) -> IO[bytes]:
    """Open a regular file for reading, without following a link or waiting for a pipe."""
    return open(
        path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    )


def _fill(file: Any, view: memoryview) -> int:
    """Read into the view; return the bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(view) and (count := file.readinto(view[done:])):
        done += count
    return done
