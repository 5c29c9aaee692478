"""What sender and receiver need from the worker that joins them to an engine. All calls come on the link thread; a
worker passes them on to the engine's inbox; the methods that answer may be called from any thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from protocol.errors import KvferryError
from protocol.link_messages import Commit
from protocol.messages import Job


class BlockMemory(Protocol):
    """The KV pool as the link sees it."""

    def block(self, block_id: int) -> Any:
        """The block's contiguous bytes: a writable uint8 numpy view on a CPU."""


@dataclass(frozen=True, slots=True)
class ShipStats:
    """Of a finished ship: blocks and bytes sent, seconds from first post to acknowledgement, and the part of them after
    `commit` was called."""

    blocks: int
    bytes: int
    ship_s: float
    exposed_s: float


class ShipEvents(Protocol):
    """Fate of one offered ship, on the prefill side. Exactly one of `done` and `failed` comes, then `quiet`."""

    def granted(self, transfer: int, first_block: int) -> None:
        """Decode reserved blocks; it already holds the prompt blocks before first_block, which need not be shipped."""

    def done(self, transfer: int, stats: ShipStats) -> None:
        """Decode acknowledged the commit."""

    def failed(self, transfer: int, error: KvferryError) -> None:
        """The ship will not complete. Blocks still may not be reused."""

    def quiet(self, transfer: int) -> None:
        """No send of this transfer touches memory any more: the engine may release its blocks."""


TransferKey = tuple[Any, int]
"""(peer, transfer): names a grant on the decode side."""


class GrantEvents(Protocol):
    """What a receiver asks of the decode engine. After `reserve` was answered with blocks, exactly one of `ready` and
    `failed` comes; after `failed`, `quiet` comes once."""

    def reserve(self, key: TransferKey, job: Job) -> None:
        """Reserve blocks for the job; answer with Receiver.granted or Receiver.refused."""

    def ready(self, key: TransferKey, commit: Commit) -> None:
        """All blocks landed and were verified, and the commit came: the request may run."""

    def failed(self, key: TransferKey, error: KvferryError) -> None:
        """The ship failed; the blocks may still be written to. Also comes for a reserve not yet answered: a grant made
        later is to be released at once (the receiver calls `quiet` for it)."""

    def quiet(self, key: TransferKey) -> None:
        """No receive of this grant touches memory any more: release its blocks."""
