"""The table of a grant's moves, as DESIGN draws them."""

from __future__ import annotations

import pytest

from kvferry.kv_transfer.receiver_grant import GRANT_LIVE, GRANT_MOVES, GrantState, OpenGrant
from tests.kv_transfer.ship_kit import check_moves, job


def test_every_state_reaches_an_end_and_every_live_one_may_fail():
    assert set(GRANT_MOVES) == set(GrantState)
    check_moves(GRANT_MOVES, GRANT_LIVE, GrantState.FAILED)


def test_a_move_outside_the_table_asserts():
    grant = OpenGrant(("peer", 1), job(1), 0.0)
    with pytest.raises(AssertionError, match="new → ready"):
        grant.move(GrantState.READY)
    grant.move(GrantState.GRANTED)
    assert grant.state is GrantState.GRANTED
