"""Interfaces that a worker implements for the dock, sender and receiver: block memory, events of ships and grants.

All calls come on the link thread; a worker passes them to the engine's inbox. The engine may answer
(`Receiver.granted`, `Sender.ship`, ...) from any thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.protocol.errors import KvferryError
from kvferry.protocol.link_messages import Commit, GrantPurpose


class BlockMemory(Protocol):
    """KV pool as the link thread sees it.

    By default, blocks are sent from and received into the pool directly. A memory that uses staging buffers overrides
    `to_send`, `to_fill`, `landed` and `give_back`. A buffer goes back to the memory once neither the link nor a
    checksum touches it."""

    def block(self, block_id: int) -> Any:
        """Return the block's contiguous bytes: on a CPU, a writable uint8 numpy view."""

    @property
    def block_bytes(self) -> int:
        """Return the size of a block in bytes."""
        return int(self.block(0).nbytes)

    def to_send(self, block_id: int) -> Any:
        """Return a buffer with the block's content, held until `give_back`."""
        return self.block(block_id)

    def to_fill(self, block_id: int) -> Any:
        """Return a writable buffer for the block's new content, held until `give_back`."""
        return self.block(block_id)

    def landed(self, block_id: int, buffer: Any) -> None:
        """Copy a filled `to_fill` buffer into its block before returning."""
        return

    def give_back(self, buffer: Any) -> None:
        """Release a buffer of `to_send` or `to_fill`."""
        return


@dataclass(frozen=True, slots=True)
class ShipStats:
    """Statistics of a finished ship.

    blocks, bytes  number and total size of the blocks sent
    sending_s      seconds with sends in flight
    ship_s         seconds with sends in flight, or between `commit` and its acknowledgement
    exposed_s      part of ship_s after the call of `commit`
    """

    blocks: int
    bytes: int
    sending_s: float
    ship_s: float
    exposed_s: float


class ShipEvents(Protocol):
    """Events of one offered ship, on the sending side: exactly one of `done` and `failed`, then `quiet`."""

    def granted(self, transfer: int, first_block: int) -> None:
        """Handle the grant: the receiving node reserved blocks.

        It already has the prompt blocks before first_block, which need not be sent."""

    def sent(self, transfer: int) -> None:
        """Handle the end of all sends posted so far; called again after later blocks."""

    def done(self, transfer: int, stats: ShipStats) -> None:
        """Handle the receiver's acknowledgement of the commit."""

    def failed(self, transfer: int, error: KvferryError) -> None:
        """Handle the ship's failure. Its blocks may not be reused before `quiet`."""

    def quiet(self, transfer: int) -> None:
        """Release the ship's blocks: no send of this transfer touches memory any more."""


TransferKey = tuple[Any, int]
"""(peer, transfer): key of a grant on the receiving side."""


class GrantEvents(Protocol):
    """Calls of the receiver to the engine of its node.

    After `reserve` was answered with blocks, exactly one of `ready` and `failed` follows. `failed` is followed by one
    `quiet`."""

    def reserve(self, key: TransferKey, purpose: GrantPurpose) -> None:
        """Reserve blocks for a request, copy or supply; answer with Receiver.granted or Receiver.refused."""

    def ready(self, key: TransferKey, commit: Commit) -> None:
        """Use the blocks: all arrived and were verified, and the commit arrived.

        The request may run now; a copy or supply is complete."""

    def failed(self, key: TransferKey, error: KvferryError) -> None:
        """Handle the failure of a grant; its blocks may still be written to until `quiet`.

        Also called for a `reserve` that is not answered yet. If the engine grants that request later, it releases the
        blocks when the receiver calls `quiet`."""

    def quiet(self, key: TransferKey) -> None:
        """Release the grant's blocks: no receive of it touches memory any more."""
