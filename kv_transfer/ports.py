"""Protocols that dock, sender and receiver need from the worker.

All calls come on the link thread, and a worker passes them to the engine's inbox. The methods that answer may be called
from any thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.protocol.errors import KvferryError
from kvferry.protocol.link_messages import Asked, Commit


class BlockMemory(Protocol):
    """The KV pool as the link sees it, on its thread.

    Blocks leave from where they lie, and land there, unless a memory says otherwise: it lends bytes then, which are
    given back once neither the link nor a checksum touches them."""

    def block(self, block_id: int) -> Any:
        """The block's contiguous bytes: a writable uint8 numpy view on a CPU."""

    @property
    def block_bytes(self) -> int:
        """Return the size of a block in bytes."""
        return int(self.block(0).nbytes)

    def to_send(self, block_id: int) -> Any:
        """Bytes that hold what the block does."""
        return self.block(block_id)

    def to_fill(self, block_id: int) -> Any:
        """Writable bytes for what the block is to hold."""
        return self.block(block_id)

    def landed(self, block_id: int, buffer: Any) -> None:
        """Copy a filled `to_fill` buffer into its block; on return the block holds it."""
        return

    def give_back(self, buffer: Any) -> None:
        """Release a buffer of `to_send` or `to_fill`."""
        return


@dataclass(frozen=True, slots=True)
class ShipStats:
    """Statistics of a finished ship.

    Blocks and bytes sent, seconds with sends in flight, seconds on the link (with sends in flight, or between `commit`
    and its acknowledgement), and the part of these after `commit` was called."""

    blocks: int
    bytes: int
    sending_s: float
    ship_s: float
    exposed_s: float


class ShipEvents(Protocol):
    """Fate of one offered ship, on the prefill side. Exactly one of `done` and `failed` comes, then `quiet`."""

    def granted(self, transfer: int, first_block: int) -> None:
        """Decode reserved blocks; it already holds the prompt blocks before first_block, which need not be shipped."""

    def sent(self, transfer: int) -> None:
        """Report that everything given to `ship` is sent; called again after later blocks."""

    def done(self, transfer: int, stats: ShipStats) -> None:
        """Decode acknowledged the commit."""

    def failed(self, transfer: int, error: KvferryError) -> None:
        """The ship will not complete. Blocks still may not be reused."""

    def quiet(self, transfer: int) -> None:
        """No send of this transfer touches memory any more: the engine may release its blocks."""


TransferKey = tuple[Any, int]
"""(peer, transfer): names a grant on the decode side."""


class GrantEvents(Protocol):
    """Receiver's calls to the decode engine.

    After `reserve` was answered with blocks, exactly one of `ready` and `failed` comes; after `failed`, `quiet` comes
    once."""

    def reserve(self, key: TransferKey, asked: Asked) -> None:
        """Reserve blocks for it; answer with Receiver.granted or Receiver.refused."""

    def ready(self, key: TransferKey, commit: Commit) -> None:
        """All blocks landed and were verified, and the commit came: the request may run, a copy or supply is whole."""

    def failed(self, key: TransferKey, error: KvferryError) -> None:
        """The ship failed; the blocks may still be written to.

        Also comes for a reserve not yet answered: a grant made later is to be released at once (the receiver calls
        `quiet` for it)."""

    def quiet(self, key: TransferKey) -> None:
        """No receive of this grant touches memory any more: release its blocks."""
