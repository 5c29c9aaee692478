"""TransferHolds: blocks of ended requests that stay held because a transfer may still read or write them."""

from __future__ import annotations

from collections.abc import Hashable

from kvferry.engine.block_interfaces import GRANT, QUIESCE, SHIP
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.request import Request, held_blocks
from kvferry.engine.request_states import State


class TransferHolds:
    """Holds of ended requests.

    ships: requests by the ship that sends their blocks, from its beginning; grants: requests by the withdrawn grant
    that received into their blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.ships: dict[int, Request] = {}
        self.grants: dict[Hashable, Request] = {}

    def __bool__(self) -> bool:
        return bool(self.ships or self.grants)

    def ship(self, request: Request) -> None:
        """Record that its blocks are being sent; a full one may still be replaced by an equal one."""
        assert request.transfer is not None
        self.ships[request.transfer] = request

    def ship_quiet(self, transfer: int) -> None:
        """Release the ship's blocks: no send touches them any more."""
        request = self.ships.pop(transfer, None)
        if request is not None:
            self._pool.release(("ship", transfer), SHIP, held_blocks(request))
            _release(request)

    def withdraw(self, request: Request) -> None:
        """Record that its grant failed while receives may still write."""
        assert request.grant is not None
        self.grants[request.grant] = request
        self._pool.holds.move(request.grant, GRANT, QUIESCE)

    def grant_quiet(self, grant: Hashable) -> None:
        """Release the withdrawn grant's blocks: no receive touches them any more."""
        request = self.grants.pop(grant, None)
        if request is not None:
            self._pool.release(grant, QUIESCE, held_blocks(request))
            _release(request)


def _release(request: Request) -> None:
    request.held_for_transfer = False
    if request.state is State.MOVING:
        request.move(State.DONE)
        request.block_ids, request.state_blocks = [], []
