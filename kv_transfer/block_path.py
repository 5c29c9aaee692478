"""Resources that all senders and receivers of a node share: link, block memory, checksums and send window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.kv_transfer.checksum import Checksums
from kvferry.kv_transfer.link import Link
from kvferry.kv_transfer.ports import BlockMemory
from kvferry.kv_transfer.send_window import SendWindow


@dataclass(frozen=True, slots=True)
class BlockPath:
    """Link, memory, checksums and send window of all block transfers of a node's dock.

    verify: share of blocks, 0 to 1, whose checksum is taken. clock: monotonic seconds."""

    link: Link
    memory: BlockMemory
    checksums: Checksums
    verify: float
    window: SendWindow
    clock: Callable[[], float]
