"""AuditSchedule, which runs the engine's audit in short turns while it is idle, and `audit`, all consistency checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from kvferry.engine import request_table
from kvferry.engine.auxiliary_blocks import AuxiliaryBlocks
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.canary import Canary
from kvferry.engine.draft_model import DraftModel
from kvferry.engine.migration import OutboundMigrations
from kvferry.engine.replication import Replicas
from kvferry.engine.request_table import RequestTable
from kvferry.engine.transfer_holds import TransferHolds

EVERY_S = 10.0
"""Least time from the end of a pass to the next, in seconds."""
TURN_S = 0.0008
"""Time after which a turn begins no further piece, in seconds, so that a command waits less than 1 ms."""
PAUSE_S = 0.01
"""Pause after a turn, in seconds."""


class AuditSchedule:
    """Schedule of audit passes. Owned by the engine thread.

    `begin` makes a pass, an iterator that checks a piece of a fraction of a millisecond at a time and raises
    AssertionError. The engine may work between pieces."""

    def __init__(self, begin: Callable[[], Iterator[None]]) -> None:
        self._begin = begin
        self._pass: Iterator[None] | None = None
        self._dirty = False
        self._ended = 0.0

    def changed(self) -> None:
        """Note that the engine has worked, so another pass may find something."""
        self._dirty = True

    def pause(self) -> float | None:
        """Return seconds until the next turn; None: there is nothing to check."""
        if self._pass is not None:
            return PAUSE_S
        return max(PAUSE_S, self._ended + EVERY_S - time.monotonic()) if self._dirty else None

    def turn(self) -> None:
        """Continue for TURN_S if a turn is due. Raises AssertionError naming the inconsistency, which ends the pass."""
        began = time.monotonic()
        if self._pass is None:
            if not self._dirty or began < self._ended + EVERY_S:
                return
            self._dirty, self._pass = False, self._begin()
        try:
            while time.monotonic() < began + TURN_S:
                next(self._pass)
        except (StopIteration, AssertionError) as end:
            self._pass, self._ended = None, time.monotonic()
            if isinstance(end, AssertionError):
                raise


class AuditedState(Protocol):
    """Engine state that the audit checks."""

    pool: BlockPool
    draft_model: DraftModel | None
    request_table: RequestTable
    transfer_holds: TransferHolds
    moving: OutboundMigrations
    copies: Replicas
    canary: Canary | None
    states: AuxiliaryBlocks | None


def audit(engine: AuditedState) -> Iterator[None]:
    """Assert that all counts agree and that an idle engine holds no block; in pieces below a millisecond."""
    yield from engine.pool.audit()
    if engine.draft_model is not None:
        yield from engine.draft_model.audit(engine.request_table)
    request_table.check_integrity(engine.request_table)
    if engine.states is not None:
        engine.states.check(engine.request_table)
    if not (engine.request_table or engine.transfer_holds or engine.moving or engine.copies or engine.canary):
        assert engine.pool.available == engine.pool.num_blocks, "blocks leaked"
