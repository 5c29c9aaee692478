"""Row format of the block index: encodes block hashes so that consecutive blocks of a chain share one key.

Most of a write's cost is per key. A row has ROW_BYTES: one byte for the block's place in its group, then 16 bytes.

Place 0 is the first block of a chain, or a block that stands alone: the 16 bytes are its hash, which is the key. Places
1 to GROUP are the blocks after it: 8 bytes of the hash of the group's first block, which are the key, then 8 bytes of
the block's own hash. The latter distinguish it from other blocks under that key, also in chains that diverge
within the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

ROW_BYTES, GROUP = 17, 16
"""Bytes of a row, and blocks that share a key."""
_PART = 8
_PLACES = [bytes((place,)) for place in range(GROUP + 1)]


def alone(block_hash: bytes) -> bytes:
    """Return the row of a chain's first block, or of a block that stands alone."""
    return _PLACES[0] + block_hash


def behind(before: bytes, block_hash: bytes) -> bytes:
    """Return the row of the block after the one of row `before`; if that is empty, of a chain's first block."""
    if not before:
        return alone(block_hash)
    place = before[0] % GROUP + 1
    leader = block_hash[:_PART] if place == 1 else before[1 : 1 + _PART]
    return _PLACES[place] + leader + block_hash[:_PART]


def rows_of(hashes: Iterable[bytes]) -> list[bytes]:
    """Return the rows of a chain, from its first block on."""
    found, before = list[bytes](), b""
    for block_hash in hashes:
        before = behind(before, block_hash)
        found.append(before)
    return found


def row_at(chain: Callable[[int], bytes], position: int) -> bytes:
    """Return the row of a chain's block at a position from 0 on. chain: returns the hash of a block by its position."""
    if not position:
        return alone(chain(0))
    place = (position - 1) % GROUP + 1
    return _PLACES[place] + chain(position - place + 1)[:_PART] + chain(position)[:_PART]


def key_and_tag(row: bytes) -> tuple[bytes, bytes]:
    """Return a row's key, and the tag that tells it from other rows under that key.

    A row that stands alone shares its key with no other row."""
    return (row[1:], b"") if row[0] == 0 else (row[1 : 1 + _PART], row[1 + _PART :])
