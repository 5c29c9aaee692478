"""Content of an object in the shared store: the blocks of a group behind a header with hashes and checksums."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from kvferry.kv_transfer.checksum import checksum
from kvferry.kv_transfer.tiers import block_header
from kvferry.kv_transfer.tiers.object_groups import Group
from kvferry.protocol.errors import BlocksCorrupt


def packed(group: Group, blocks: Sequence[Any], fingerprint: str, block_bytes: int) -> bytes:
    """Return the content of an object. blocks: contiguous bytes of all blocks of the group."""
    sums = array("q", (checksum(block) for block in blocks))
    lead = block_header.packed(fingerprint, block_bytes, group.parent, group.hashes, sums)
    return b"".join((lead, *blocks))


def unpack(content: memoryview, group: Group, blocks: Sequence[Any], fingerprint: str, block_bytes: int) -> None:
    """Copy the last blocks of a group into these buffers. Raises BlocksCorrupt if the content is corrupt."""
    length = block_header.length(bytes(content[: block_header.PAGE]))
    header = block_header.unpacked(bytes(content[:length]), fingerprint, block_bytes) if length else None
    if (
        header is None
        or header.hashes != group.hashes
        or len(content) != header.start + len(header.hashes) * block_bytes
    ):
        raise BlocksCorrupt(f"{group.name} is corrupt")
    for index, block in enumerate(blocks, len(group.hashes) - len(blocks)):
        at = header.start + index * block_bytes
        memoryview(block).cast("B")[:] = content[at : at + block_bytes]
        if checksum(block) != header.sums[index]:
            raise BlocksCorrupt(f"block {index} of {group.name} is corrupt")
