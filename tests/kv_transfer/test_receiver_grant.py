"""The table of a grant's moves, as DESIGN draws them, and what is remembered of a sender."""

from __future__ import annotations

import pytest
from ship_kit import check_moves, job

from kv_transfer.receiver_grant import GRANT_LIVE, GRANT_MOVES, REMEMBERED, GrantState, OpenGrant, SendingProcess


def test_every_state_reaches_an_end_and_every_live_one_may_fail():
    assert set(GRANT_MOVES) == set(GrantState)
    check_moves(GRANT_MOVES, GRANT_LIVE, GrantState.FAILED)


def test_a_move_outside_the_table_asserts():
    grant = OpenGrant(("peer", 1), job(1), 0.0)
    with pytest.raises(AssertionError, match="new → ready"):
        grant.move(GrantState.READY)
    grant.move(GrantState.GRANTED)
    assert grant.state is GrantState.GRANTED


def test_a_transfer_is_new_once_while_it_is_remembered():
    sender = SendingProcess(1)
    assert [sender.is_new(t) for t in (1, 2, 1)] == [True, True, False]
    assert all(sender.is_new(t) for t in range(3, 3 + REMEMBERED))
    assert sender.is_new(1)
