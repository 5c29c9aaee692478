"""Block handling that inbound and outbound transfers share: tags, checksums and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.kv_transfer.checksum import Checksums
from kvferry.kv_transfer.link import Link
from kvferry.kv_transfer.ports import BlockMemory
from kvferry.kv_transfer.send_window import SendWindow


@dataclass(frozen=True, slots=True)
class BlockPath:
    """The link they take, the memory they lie in, how they are checked (`verify` is the share of blocks, 0 to 1, whose
    checksum is taken), and how many may be on their way. clock: monotonic seconds."""

    link: Link
    memory: BlockMemory
    checksums: Checksums
    verify: float
    window: SendWindow
    clock: Callable[[], float]
