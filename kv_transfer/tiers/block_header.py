"""Header in front of KV blocks that are stored outside of a pool; it proves what they are.

8 bytes     MAGIC
4 bytes     length of the description, little endian
...         description, msgpack: [fingerprint, bytes of a block, hash of the block before the first or
            empty, hashes, checksums]; zeros up to a whole page
...         the blocks
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

MAGIC = b"kvferry1"
PAGE = 4096
"""Bytes to a multiple of which a header is padded."""
LONGEST = 1 << 20
"""Bytes of a description."""
_LENGTH = struct.Struct("<I")
_BEFORE = len(MAGIC) + _LENGTH.size


@dataclass(frozen=True, slots=True)
class Header:
    """parent: hash of the block before the first one, empty at the beginning of a chain; hashes, sums: of the blocks,
    in their order; start: bytes in front of the first one."""

    parent: bytes
    hashes: tuple[bytes, ...]
    sums: array[int]
    start: int


def packed(fingerprint: str, block_bytes: int, parent: bytes, hashes: Sequence[bytes], sums: Sequence[int]) -> bytes:
    """A header, up to its last page's end."""
    told: bytes = msgpack.packb([fingerprint, block_bytes, parent, list(hashes), list(sums)])
    header = MAGIC + _LENGTH.pack(len(told)) + told
    return header.ljust(-(-len(header) // PAGE) * PAGE, b"\0")


def length(lead: bytes) -> int | None:
    """Bytes of the header, but for the rest of its last page, that begins like this page; None: it is none."""
    if len(lead) < PAGE or not lead.startswith(MAGIC):
        return None
    (told,) = _LENGTH.unpack_from(lead, len(MAGIC))
    return _BEFORE + told if told <= LONGEST else None


def unpacked(header: bytes, fingerprint: str, block_bytes: int) -> Header | None:
    """None for what is no header of such blocks. header: as long as `length` says, at least."""
    told_bytes = length(header.ljust(PAGE, b"\0"))
    if told_bytes is None:
        return None
    try:
        told: Any = msgpack.unpackb(header[_BEFORE:told_bytes])
        written_for, written_bytes, parent, hashes, sums = told
        found = Header(parent, tuple(hashes), array("q", sums), -(-told_bytes // PAGE) * PAGE)
        ours = (written_for, written_bytes) == (fingerprint, block_bytes) and len(found.sums) == len(found.hashes) > 0
        return found if ours and all(isinstance(each, bytes) for each in (parent, *found.hashes)) else None
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
        return None
