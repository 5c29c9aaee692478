"""States of a ship on both sides, with the moves that are allowed."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar


class ShipState(StrEnum):
    """Prefill side. RUNNING: blocks are posted; DRAINING: everything was posted, the acknowledgement is awaited;
    QUIET: no send touches memory any more."""

    OFFERED = "offered"
    GRANTED = "granted"
    RUNNING = "running"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"
    QUIET = "quiet"


class GrantState(StrEnum):
    """Decode side, up to the hand-over to the engine (READY). LANDED: every receive completed; QUIESCING: failed, own
    receives or the engine's answer are awaited; QUIET: no receive touches memory any more."""

    NEW = "new"
    GRANTED = "granted"
    RECEIVING = "receiving"
    LANDED = "landed"
    READY = "ready"
    FAILED = "failed"
    QUIESCING = "quiescing"
    QUIET = "quiet"


State = TypeVar("State", ShipState, GrantState)

SHIP_MOVES: dict[ShipState, frozenset[ShipState]] = {
    ShipState.OFFERED: frozenset({ShipState.GRANTED, ShipState.FAILED}),
    ShipState.GRANTED: frozenset({ShipState.RUNNING, ShipState.DRAINING, ShipState.FAILED}),
    ShipState.RUNNING: frozenset({ShipState.DRAINING, ShipState.FAILED}),
    ShipState.DRAINING: frozenset({ShipState.DONE, ShipState.FAILED}),
    ShipState.DONE: frozenset({ShipState.QUIET}),
    ShipState.FAILED: frozenset({ShipState.QUIET}),
    ShipState.QUIET: frozenset(),
}

GRANT_MOVES: dict[GrantState, frozenset[GrantState]] = {
    GrantState.NEW: frozenset({GrantState.GRANTED, GrantState.FAILED}),
    GrantState.GRANTED: frozenset({GrantState.RECEIVING, GrantState.LANDED, GrantState.FAILED}),
    GrantState.RECEIVING: frozenset({GrantState.LANDED, GrantState.FAILED}),
    GrantState.LANDED: frozenset({GrantState.READY, GrantState.FAILED}),
    GrantState.READY: frozenset(),
    GrantState.FAILED: frozenset({GrantState.QUIESCING}),
    GrantState.QUIESCING: frozenset({GrantState.QUIET}),
    GrantState.QUIET: frozenset(),
}


def moved(old: State, new: State) -> State:
    """`new`, asserting that the tables allow the move."""
    allowed = SHIP_MOVES[old] if isinstance(old, ShipState) else GRANT_MOVES[old]
    assert new in allowed, f"{old} → {new} is not allowed"
    return new
