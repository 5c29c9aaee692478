"""Mistakes that moves of streams might have."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from kvferry.engine.block_interfaces import SHIP
from kvferry.engine.migration import OutboundMigration, OutboundMigrations
from kvferry.router.dispatch.migration import Migration
from tests.virtual.mistake import Mutant, mutant


@mutant("is sent, but not held")
def moving_blocks_not_held() -> Mutant:
    """A move's full blocks are held by its stream alone, which may end."""

    def begin(moving: OutboundMigrations, *asked: Any) -> OutboundMigration:
        move = real(moving, *asked)
        moving._pool.release(("ship", move.transfer), SHIP, moving._transfer_holds[move.transfer])
        moving._transfer_holds[move.transfer] = []
        return move

    real = OutboundMigrations.begin
    return patch.object(OutboundMigrations, "begin", begin)


@mutant("blocks of moves are held by nobody")
def moved_but_never_let_go() -> Mutant:
    """What was sent from for a move is held for good."""
    return patch.object(OutboundMigrations, "quiet", lambda moving, transfer: None)


@mutant("booked")
def heir_left_open() -> Mutant:
    """A move that failed leaves its successor where it was to go."""

    def end(migration: Migration) -> None:
        migration._successor = None

    return patch.object(Migration, "end", end)
