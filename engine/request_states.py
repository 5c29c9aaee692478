"""States of a request and the allowed transitions."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """WAITING: queued, without blocks; AWAITING: not to be scheduled until something that it `Awaits` is there, with or
    without blocks; RUNNING: with blocks, part of every step that has room for it; MOVING: nothing of it is computed
    here any more, and its blocks stay held until the link is quiet; DONE: it holds nothing."""

    WAITING = "waiting"
    AWAITING = "awaiting"
    RUNNING = "running"
    MOVING = "moving"
    DONE = "done"


class Awaits(StrEnum):
    """Conditions that a request waits for.

    KV: blocks that a ship brings, or that another request here will have; GRAMMAR: its compiled grammar; FETCH: blocks
    from a peer; TIER: blocks from a slower memory of this node; HANDOVER: another node's word that it goes on there."""

    KV = "kv"
    GRAMMAR = "grammar"
    FETCH = "fetch"
    TIER = "tier"
    HANDOVER = "handover"


MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.AWAITING, State.RUNNING, State.DONE}),
    State.AWAITING: frozenset({State.WAITING, State.RUNNING, State.MOVING, State.DONE}),
    State.RUNNING: frozenset({State.WAITING, State.AWAITING, State.MOVING, State.DONE}),
    State.MOVING: frozenset({State.DONE}),
    State.DONE: frozenset(),
}
"""RUNNING → WAITING is a preemption, RUNNING → AWAITING a stream that stands still while another node takes it over;
AWAITING → MOVING a grant withdrawn while the link may still write."""
