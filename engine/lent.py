"""Blocks that the link may still touch when their requests need them no more: they stay held until it is quiet."""

from __future__ import annotations

from collections.abc import Hashable

from engine.block_pool import BlockPool
from engine.ports import GRANT, QUIESCE, SHIP


class Lent:
    """`ships`: blocks by the ship that sends them; `grants`: blocks by the withdrawn grant that received into them."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.ships: dict[int, list[int]] = {}
        self.grants: dict[Hashable, list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self.ships or self.grants)

    def ship(self, transfer: int, block_ids: list[int]) -> None:
        """The chain is being sent. The list stays the request's own: a full block may be exchanged for an equal one."""
        self.ships[transfer] = block_ids

    def ship_quiet(self, transfer: int) -> None:
        """No send of the ship touches its blocks any more."""
        self._pool.release(("ship", transfer), SHIP, self.ships.pop(transfer, []))

    def withdraw(self, owner: Hashable, block_ids: list[int]) -> None:
        """The grant failed, and receives may still write."""
        self.grants[owner] = block_ids
        self._pool.holds.move(owner, GRANT, QUIESCE)

    def grant_quiet(self, owner: Hashable) -> None:
        """No receive of the withdrawn grant touches its blocks any more."""
        self._pool.release(owner, QUIESCE, self.grants.pop(owner, []))
