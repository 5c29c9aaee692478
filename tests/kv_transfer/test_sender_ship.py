"""The table of a ship's moves, as DESIGN draws them."""

from __future__ import annotations

import pytest

from kvferry.kv_transfer.sender_ship import SHIP_LIVE, SHIP_MOVES, Ship, ShipState
from tests.kv_transfer.ship_kit import check_moves


def test_every_state_reaches_an_end_and_every_live_one_may_fail():
    assert set(SHIP_MOVES) == set(ShipState)
    check_moves(SHIP_MOVES, SHIP_LIVE, ShipState.FAILED)


def test_a_move_outside_the_table_asserts():
    ship = Ship(1, None, "d", "peer", 0.0, ("p", 3))
    with pytest.raises(AssertionError, match="offered → done"):
        ship.move(ShipState.DONE)
    ship.move(ShipState.GRANTED)
    assert ship.state is ShipState.GRANTED
