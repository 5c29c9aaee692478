"""Keys of the block index: consecutive blocks of a chain share one key, since most of a write's cost is per key.

A row is ROW_BYTES: the block's place in its group, and 16 bytes by that. Place 0, of a chain's first block and of what
stands for itself: its hash, which is the key. Places 1 to GROUP, of the blocks behind: 8 bytes of the hash of the
group's first block, which are the key, and 8 of the block's own, which tell it from others there, also of chains that
part within the group.
"""

from __future__ import annotations

from collections.abc import Iterable

ROW_BYTES, GROUP = 17, 16
_PART = 8
_PLACES = [bytes((place,)) for place in range(GROUP + 1)]


def alone(block_hash: bytes) -> bytes:
    """Row of a chain's first block, or of one that stands for itself."""
    return _PLACES[0] + block_hash


def behind(before: bytes, block_hash: bytes) -> bytes:
    """Row of the block behind the one of this row; empty: of the first of a chain."""
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


def key_and_tag(row: bytes) -> tuple[bytes, bytes]:
    """Its key, and what tells it from others of that key; no row that stands alone has another's key."""
    return (row[1:], b"") if row[0] == 0 else (row[1 : 1 + _PART], row[1 + _PART :])
