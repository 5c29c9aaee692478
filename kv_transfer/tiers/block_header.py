"""Header in front of KV blocks that are stored in a file or object: it names the blocks and holds their checksums.

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
"""Size in bytes to a multiple of which a header is padded."""
MAX_DESCRIPTION_BYTES = 1 << 20
"""Maximum size of a description in bytes."""
_LENGTH = struct.Struct("<I")
_BEFORE = len(MAGIC) + _LENGTH.size


@dataclass(frozen=True, slots=True)
class Header:
    """Parsed header of a group of consecutive blocks.

    parent        hash of the block before the first one; empty at the beginning of a chain
    hashes, sums  hash and checksum of each block, in order
    start         offset of the first block, in bytes
    """

    parent: bytes
    hashes: tuple[bytes, ...]
    sums: array[int]
    start: int


def packed(fingerprint: str, block_bytes: int, parent: bytes, hashes: Sequence[bytes], sums: Sequence[int]) -> bytes:
    """Return a header, padded to whole pages."""
    description: bytes = msgpack.packb([fingerprint, block_bytes, parent, list(hashes), list(sums)])
    header = MAGIC + _LENGTH.pack(len(description)) + description
    return header.ljust(-(-len(header) // PAGE) * PAGE, b"\0")


def length(lead: bytes) -> int | None:
    """Return the unpadded length in bytes of the header that begins with this page; None if it is no header."""
    if len(lead) < PAGE or not lead.startswith(MAGIC):
        return None
    (size,) = _LENGTH.unpack_from(lead, len(MAGIC))
    return _BEFORE + size if size <= MAX_DESCRIPTION_BYTES else None


def unpacked(header: bytes, fingerprint: str, block_bytes: int) -> Header | None:
    """Return the parsed header; None if it is invalid or describes other blocks.

    header: at least as long as `length` says."""
    end_of_description = length(header.ljust(PAGE, b"\0"))
    if end_of_description is None:
        return None
    try:
        description: Any = msgpack.unpackb(header[_BEFORE:end_of_description])
        written_for, written_bytes, parent, hashes, sums = description
        found = Header(parent, tuple(hashes), array("q", sums), -(-end_of_description // PAGE) * PAGE)
        ours = (written_for, written_bytes) == (fingerprint, block_bytes) and len(found.sums) == len(found.hashes) > 0
        return found if ours and all(isinstance(each, bytes) for each in (parent, *found.hashes)) else None
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
        return None
