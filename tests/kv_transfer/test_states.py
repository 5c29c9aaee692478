"""The tables of allowed moves, as DESIGN draws them."""

from __future__ import annotations

import pytest

from kv_transfer.states import GRANT_MOVES, SHIP_MOVES, GrantState, ShipState, moved


@pytest.mark.parametrize(("moves", "failed"), [(SHIP_MOVES, ShipState.FAILED), (GRANT_MOVES, GrantState.FAILED)])
def test_every_state_reaches_an_end_and_every_live_one_may_fail(moves, failed):
    assert set(moves) == set(type(failed))
    ends = {state for state, nexts in moves.items() if not nexts}
    for state in moves:
        reached, todo = set(), {state}
        while todo:
            reached |= todo
            todo = {n for s in todo for n in moves[s]} - reached
        assert reached & ends, state
    after_end = {s for s in moves if s in ("done", "failed", "quiescing", "quiet", "ready")}
    assert {s for s in moves if failed not in moves[s]} == after_end


def test_a_move_outside_the_table_asserts():
    assert moved(ShipState.OFFERED, ShipState.GRANTED) is ShipState.GRANTED
    with pytest.raises(AssertionError, match="offered → done"):
        moved(ShipState.OFFERED, ShipState.DONE)
    with pytest.raises(AssertionError):
        moved(GrantState.QUIET, GrantState.NEW)
