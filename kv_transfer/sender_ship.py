"""A ship as the sender knows it: its states, with the moves that are allowed, and what is remembered of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kv_transfer.link import Peer
from kv_transfer.outgoing import Outgoing
from kv_transfer.ports import ShipStats
from protocol.link_messages import Commit
from protocol.messages import Job, TokenDelta


class ShipState(StrEnum):
    """RUNNING: blocks are posted; DRAINING: everything was posted, the acknowledgement is awaited; QUIET: no send
    touches memory any more."""

    OFFERED = "offered"
    GRANTED = "granted"
    RUNNING = "running"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"
    QUIET = "quiet"


SHIP_MOVES: dict[ShipState, frozenset[ShipState]] = {
    ShipState.OFFERED: frozenset({ShipState.GRANTED, ShipState.FAILED}),
    ShipState.GRANTED: frozenset({ShipState.RUNNING, ShipState.DRAINING, ShipState.FAILED}),
    ShipState.RUNNING: frozenset({ShipState.DRAINING, ShipState.FAILED}),
    ShipState.DRAINING: frozenset({ShipState.DONE, ShipState.FAILED}),
    ShipState.DONE: frozenset({ShipState.QUIET}),
    ShipState.FAILED: frozenset({ShipState.QUIET}),
    ShipState.QUIET: frozenset(),
}
SHIP_LIVE = frozenset({ShipState.OFFERED, ShipState.GRANTED, ShipState.RUNNING, ShipState.DRAINING})


@dataclass(slots=True, eq=False)
class Ship:
    """One offer. unanswered: neither Grant nor Refusal came yet; blocks: once the grant came; first: the first token,
    once the engine committed."""

    transfer: int
    job: Job
    peer: Peer
    deadline: float
    state: ShipState = ShipState.OFFERED
    unanswered: bool = True
    blocks: Outgoing | None = None
    first: TokenDelta | None = None
    commit_sent: bool = False
    posted_at: float | None = None
    committed_at: float = 0.0

    @property
    def key(self) -> int:
        return self.transfer

    @property
    def in_flight(self) -> int:
        """Posted sends not ended."""
        return self.blocks.in_flight if self.blocks else 0

    @property
    def live(self) -> bool:
        """Whether it can still be done."""
        return self.state in SHIP_LIVE

    def take_commit(self) -> Commit | None:
        """The commit, once: when the engine called for it and every checksum is taken."""
        if self.state is not ShipState.DRAINING or self.commit_sent or self.blocks is None or self.first is None:
            return None
        checksums = self.blocks.checksums()
        if checksums is None:
            return None
        self.commit_sent = True
        return Commit(self.transfer, self.blocks.posted, checksums, self.first)

    def stats(self, now: float) -> ShipStats:
        """Of a ship that is acknowledged now."""
        assert self.blocks is not None
        began = self.committed_at if self.posted_at is None else min(self.posted_at, self.committed_at)
        return ShipStats(self.blocks.posted, self.blocks.bytes, now - began, now - self.committed_at)

    def move(self, new: ShipState) -> None:
        """To a state that the table allows."""
        assert new in SHIP_MOVES[self.state], f"{self.state} → {new} is not allowed"
        self.state = new
