"""State machine of a ship on the sending side."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import NamedTuple

from kvferry.kv_transfer.dock import QUIESCE_TIMEOUT_S
from kvferry.kv_transfer.link import MAX_MESSAGE_BYTES, Peer
from kvferry.kv_transfer.outgoing import Outgoing
from kvferry.kv_transfer.ports import ShipEvents, ShipStats
from kvferry.kv_transfer.retransmission import Question
from kvferry.protocol.errors import Draining, GrantRefused, InvalidRequest, KvferryError, NodeLost, TransferFailed
from kvferry.protocol.link_messages import Asked, Commit, Supply
from kvferry.protocol.messages import TokenDelta
from kvferry.protocol.process_names import NodeName

STALL_TIMEOUT_S = 15.0


class ShipTimeouts(NamedTuple):
    """grant_s: seconds an offer waits for its grant; stall_s: seconds in which something of a ship must move while its
    blocks are being sent, or its commit waits for the acknowledgement: one that moves has all the time it needs."""

    grant_s: float = 30.0
    stall_s: float = STALL_TIMEOUT_S


USUAL = ShipTimeouts()


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
    """One offer of the node `sender`, to the node `decode`; `events` hear of it.

    unanswered: neither Grant nor Refusal came yet; blocks: once the grant came; first, covered: see Commit, once the
    engine committed, at committed_at; sent_before_s: seconds of sending until then. ends: when it has not moved for too
    long; question: what decode has to answer."""

    transfer: int
    events: ShipEvents
    decode: str
    peer: Peer
    ends: float
    sender: NodeName
    patience: ShipTimeouts = USUAL
    state: ShipState = ShipState.OFFERED
    unanswered: bool = True
    blocks: Outgoing | None = None
    first: TokenDelta | None = None
    covered: int = 0
    commit_sent: bool = False
    committed_at: float = 0.0
    sent_before_s: float = 0.0
    question: Question = field(default_factory=Question)

    @property
    def deadline(self) -> float:
        """Return when to check the ship next."""
        return min(self.ends, self.question.repeat_at)

    @property
    def key(self) -> int:
        return self.transfer

    @property
    def in_flight(self) -> int:
        """Posted sends not ended."""
        return self.blocks.in_flight if self.blocks else 0

    @property
    def live(self) -> bool:
        """Return whether it can still be done."""
        return self.state in SHIP_LIVE

    def take_commit(self) -> Commit | None:
        """The commit, once: when the engine called for it and every checksum is taken."""
        if self.state is not ShipState.DRAINING or self.commit_sent or self.blocks is None:
            return None
        checksums = self.blocks.checksums()
        if checksums is None:
            return None
        self.commit_sent = True
        return Commit(self.transfer, self.blocks.posted, checksums, self.first, self.covered, self.sender)

    def commit(self, first: TokenDelta | None, covered: int, at: float) -> None:
        """The engine computed everything, and the first token, at this time."""
        assert self.blocks is not None
        self.first, self.covered, self.committed_at = first, covered, at
        self.sent_before_s = self.blocks.sent_before(at)
        self.move(ShipState.DRAINING)

    def stats(self, now: float) -> ShipStats:
        """Return the statistics of an acknowledged ship."""
        assert self.blocks is not None
        exposed = now - self.committed_at
        sent = self.blocks
        return ShipStats(sent.posted, sent.bytes, sent.sent_before(now), self.sent_before_s + exposed, exposed)

    def progressed(self, now: float) -> None:
        """Something of it moved, or is to move from now on: its deadline is counted anew."""
        if not self.live:
            self.ends = now + QUIESCE_TIMEOUT_S
        elif self.state is ShipState.DRAINING or (self.blocks is not None and self.blocks.under_way):
            self.ends = now + self.patience.stall_s
        else:
            self.ends = inf

    def hear(self) -> None:
        """Grant or Refusal came, or will not."""
        self.unanswered = False
        self.question.answered()

    def repeats(self, now: float) -> bool:
        """Return whether its question is to be sent again now."""
        return (now <= self.ends or not self.live) and self.question.due(now)

    def blame(self, error: KvferryError) -> KvferryError:
        """What the decode node, or the way to it, did to the ship: it names that node, for routers hear of it from this
        one. A node that drains takes nothing new, which is no more than a refusal of this offer."""
        if not isinstance(error, NodeLost | TransferFailed | GrantRefused | Draining):
            return error
        kind = GrantRefused if isinstance(error, Draining) else type(error)
        return kind(f"decode node {self.decode}: {error.message}")

    def move(self, new: ShipState) -> None:
        """Change to a state that the table allows."""
        assert new in SHIP_MOVES[self.state], f"{self.state} → {new} is not allowed"
        self.state = new


def too_long(asked: Asked, size: int) -> KvferryError | None:
    """Return why a grant request of `size` bytes cannot be sent, if so."""
    if size <= MAX_MESSAGE_BYTES:
        return None
    tokens = 0 if isinstance(asked, Supply) else len(asked.token_ids)
    text = f"{tokens} tokens do not fit into a grant request of {MAX_MESSAGE_BYTES} bytes"
    return InvalidRequest(text, param="prompt")


def has_sent(ship: Ship) -> bool:
    """Return whether all blocks that were posted so far are sent, and others follow."""
    return ship.state is ShipState.RUNNING and ship.blocks is not None and not ship.blocks.under_way


def lack(ship: Ship, covered: int) -> str:
    """Return why the ship cannot be committed; empty if it can.

    What lies beyond the `covered` tokens is left out."""
    if covered and ship.blocks is not None:
        ship.blocks.leave_out()
    if ship.blocks is not None and ship.blocks.complete:
        return ""
    posted, count = (ship.blocks.posted, ship.blocks.count) if ship.blocks else (0, 0)
    return f"commit after {posted} of {count} blocks"
