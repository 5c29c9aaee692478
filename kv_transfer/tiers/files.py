"""One file of a disk tier: KV blocks that follow each other in a chain, behind a header that proves them.

    8 bytes     MAGIC
    4 bytes     length of the description, little endian
    ...         description, msgpack: [fingerprint, bytes of a block, hash of the block before the first or
                empty, hashes, checksums]; zeros up to a whole page
    ...         the blocks

A file has its name only once it is whole. It is not flushed to the device: what a crash of the machine tears shows in
its length or its checksums, and is computed again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from kv_transfer.checksum import checksum
from protocol.errors import BlocksCorrupt

MAGIC = b"kvferry1"
SUFFIX, UNFINISHED = ".kv", ".part"
PAGE = 4096
LONGEST_HEADER = 1 << 20
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Group:
    """A whole file. parent: hash of the block before its first one, empty at the beginning of a chain; hashes, sums: of
    its blocks, in their order; start: bytes in front of the first one."""

    path: Path
    parent: bytes
    hashes: tuple[bytes, ...]
    sums: tuple[int, ...]
    start: int
    block_bytes: int

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.start + len(self.hashes) * self.block_bytes


def size_of(fingerprint: str, hashes: Sequence[bytes], block_bytes: int) -> int:
    """Bytes of a file of these blocks, at most."""
    return (
        len(_header(fingerprint, block_bytes, hashes[0], hashes, [2**63 - 1] * len(hashes))) + len(hashes) * block_bytes
    )


def write(directory: Path, fingerprint: str, hashes: Sequence[bytes], parent: bytes, blocks: Sequence[Any]) -> Group:
    """A new file of blocks (contiguous bytes, all of one length). Raises OSError; nothing is left of it then."""
    block_bytes = memoryview(blocks[0]).nbytes
    sums = [checksum(block) for block in blocks]
    header = _header(fingerprint, block_bytes, parent, hashes, sums)
    group = Group(directory / (hashes[-1].hex() + SUFFIX), parent, tuple(hashes), tuple(sums), len(header), block_bytes)
    unfinished = group.path.with_suffix(UNFINISHED)
    try:
        with unfinished.open("wb") as file:
            for part in (header, *blocks):
                file.write(part)
        unfinished.replace(group.path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise
    return group


def read(group: Group, first: int, blocks: Sequence[Any]) -> None:
    """Into these blocks (writable contiguous bytes) what the file has from its block `first` on. Raises OSError, and
    BlocksCorrupt for what is not as it was written."""
    with group.path.open("rb", buffering=0) as file:
        file.seek(group.start + first * group.block_bytes)
        for index, block in enumerate(blocks, first):
            view = memoryview(block).cast("B")
            if _fill(file, view) < len(view) or checksum(block) != group.sums[index]:
                raise BlocksCorrupt(f"block {index} of {group.path.name} is not as it was written")


def find(directory: Path, fingerprint: str, block_bytes: int) -> Iterator[Group]:
    """The whole files of this kind that are there, those first that were used longest ago. What else looks like one,
    or was being written, is removed."""
    for path in directory.glob(f"*{UNFINISHED}"):
        path.unlink(missing_ok=True)
    for path in sorted(directory.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns):
        group = _describe(path, fingerprint, block_bytes)
        if group is None:
            path.unlink(missing_ok=True)
        else:
            yield group


def _header(fingerprint: str, block_bytes: int, parent: bytes, hashes: Sequence[bytes], sums: Sequence[int]) -> bytes:
    told: bytes = msgpack.packb([fingerprint, block_bytes, parent, list(hashes), list(sums)])
    header = MAGIC + _LENGTH.pack(len(told)) + told
    return header.ljust(-(-len(header) // PAGE) * PAGE, b"\0")


def _describe(path: Path, fingerprint: str, block_bytes: int) -> Group | None:
    """None for what is not a whole file of these blocks."""
    with path.open("rb") as file:
        lead = file.read(len(MAGIC) + _LENGTH.size)
        if len(lead) < len(MAGIC) + _LENGTH.size or not lead.startswith(MAGIC):
            return None
        (length,) = _LENGTH.unpack(lead[len(MAGIC) :])
        told = file.read(min(length, LONGEST_HEADER))
    try:
        written_for, written_bytes, parent, hashes, sums = msgpack.unpackb(told)
        start = -(-(len(lead) + length) // PAGE) * PAGE
        group = Group(path, parent, tuple(hashes), tuple(sums), start, block_bytes)
        ours = (written_for, written_bytes) == (fingerprint, block_bytes) and len(sums) == len(hashes) > 0
        typed = all(isinstance(each, bytes) for each in (parent, *hashes)) and all(
            isinstance(each, int) for each in sums
        )
        return group if ours and typed and path.stat().st_size == group.size else None
    except (ValueError, TypeError, msgpack.UnpackException):
        return None


def _fill(file: Any, view: memoryview) -> int:
    """Bytes read, fewer only where the file ends."""
    done = 0
    while done < len(view) and (count := file.readinto(view[done:])):
        done += count
    return done
