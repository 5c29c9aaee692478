"""States of a request in the engine, the conditions that it may wait for, and the allowed transitions."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """State of a request.

    WAITING: queued, without blocks; AWAITING: not to be scheduled until its conditions (`Awaits`) are met, with or
    without blocks; RUNNING: with blocks, part of every step whose budget allows it; MOVING: no longer computed here,
    blocks held until the link is quiet; DONE: holds nothing."""

    WAITING = "waiting"
    AWAITING = "awaiting"
    RUNNING = "running"
    MOVING = "moving"
    DONE = "done"


class Awaits(StrEnum):
    """Conditions that a request waits for.

    KV: blocks that a ship brings, or that another request here will have; GRAMMAR: its compiled grammar; FETCH: blocks
    from a peer; TIER: blocks from a slower memory of this node; MEDIA: rows of images, audio or video; HANDOVER:
    another node's confirmation that it continues the stream."""

    KV = "kv"
    GRAMMAR = "grammar"
    FETCH = "fetch"
    TIER = "tier"
    MEDIA = "media"
    HANDOVER = "handover"


MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.AWAITING, State.RUNNING, State.DONE}),
    State.AWAITING: frozenset({State.WAITING, State.RUNNING, State.MOVING, State.DONE}),
    State.RUNNING: frozenset({State.WAITING, State.AWAITING, State.MOVING, State.DONE}),
    State.MOVING: frozenset({State.DONE}),
    State.DONE: frozenset(),
}
"""Allowed transitions.

WAITING → AWAITING: rows of its media are to come first. RUNNING → WAITING is a preemption. RUNNING → AWAITING is a
stream that pauses while another node takes it over. AWAITING → MOVING is a grant withdrawn while the link may still
write."""
