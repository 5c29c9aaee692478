"""What the blocks of all transfers of a side have in common."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.checksum import Checksums
from kv_transfer.link import Link
from kv_transfer.ports import BlockMemory


@dataclass(frozen=True, slots=True)
class BlockPath:
    """The link they take, the memory they lie in, and how they are checked: `verify` is the share of blocks, 0 to 1,
    whose checksum is taken."""

    link: Link
    memory: BlockMemory
    checksums: Checksums
    verify: float
