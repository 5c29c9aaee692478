"""Ship: state machine of a transfer of KV blocks on the sending side, with its timeouts; Sender drives it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import NamedTuple

from kvferry.kv_transfer.dock import QUIESCE_TIMEOUT_S
from kvferry.kv_transfer.link import MAX_MESSAGE_BYTES, Peer
from kvferry.kv_transfer.outgoing import Outgoing
from kvferry.kv_transfer.ports import ShipEvents, ShipStats
from kvferry.kv_transfer.retransmission import PendingMessage
from kvferry.protocol.errors import Draining, GrantRefused, InvalidRequest, KvferryError, NodeLost, TransferFailed
from kvferry.protocol.link_messages import Commit, EmbeddingSupply, GrantPurpose, Supply
from kvferry.protocol.messages import TokenDelta
from kvferry.protocol.process_names import NodeName

STALL_TIMEOUT_S = 15.0
"""Seconds without progress after which a ship fails."""


class ShipTimeouts(NamedTuple):
    """Timeouts of a ship. A ship that makes progress has no limit on its total time.

    grant_s: maximum time that an offer waits for its grant. stall_s: maximum time without progress while blocks are
    being sent or the commit waits for its acknowledgement. Both in seconds."""

    grant_s: float = 30.0
    stall_s: float = STALL_TIMEOUT_S


DEFAULT_TIMEOUTS = ShipTimeouts()


class ShipState(StrEnum):
    """State of a ship on the sending side.

    RUNNING: blocks are being posted. DRAINING: everything is posted, and the receiver has not acknowledged it yet.
    QUIET: no send touches memory any more."""

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
    """One offer of node `sender` to the receiving node `receiver`. `events` receives its events.

    unanswered      neither Grant nor Refusal has arrived
    blocks          set by the grant
    first, covered  set by the engine's commit (see Commit), at time committed_at
    sent_before_s   seconds with sends in flight before the commit
    ends            time at which the ship fails for lack of progress
    pending         the message that the receiver has to answer
    """

    transfer: int
    events: ShipEvents
    receiver: str
    peer: Peer
    ends: float
    sender: NodeName
    timeouts: ShipTimeouts = DEFAULT_TIMEOUTS
    state: ShipState = ShipState.OFFERED
    unanswered: bool = True
    blocks: Outgoing | None = None
    first: TokenDelta | None = None
    covered: int = 0
    commit_sent: bool = False
    committed_at: float = 0.0
    sent_before_s: float = 0.0
    pending: PendingMessage = field(default_factory=PendingMessage)

    @property
    def deadline(self) -> float:
        """Return the time of the next check of this ship."""
        return min(self.ends, self.pending.repeat_at)

    @property
    def key(self) -> int:
        """Return the transfer id."""
        return self.transfer

    @property
    def in_flight(self) -> int:
        """Return the number of posted sends that have not ended."""
        return self.blocks.in_flight if self.blocks else 0

    @property
    def live(self) -> bool:
        """Return whether the ship can still complete."""
        return self.state in SHIP_LIVE

    def take_commit(self) -> Commit | None:
        """Return the commit message, once: after the engine's commit, when every checksum is taken."""
        if self.state is not ShipState.DRAINING or self.commit_sent or self.blocks is None:
            return None
        checksums = self.blocks.checksums()
        if checksums is None:
            return None
        self.commit_sent = True
        return Commit(self.transfer, self.blocks.posted, checksums, self.first, self.covered, self.sender)

    def commit(self, first: TokenDelta | None, covered: int, at: float) -> None:
        """Record the engine's commit: all blocks and the first token were computed at time `at`."""
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
        """Restart the stall timeout: the ship made progress or changed its state."""
        if not self.live:
            self.ends = now + QUIESCE_TIMEOUT_S
        elif self.state is ShipState.DRAINING or (self.blocks is not None and self.blocks.in_progress):
            self.ends = now + self.timeouts.stall_s
        else:
            self.ends = inf

    def offer_answered(self) -> None:
        """Record that the offer's Grant or Refusal arrived, or that none will arrive."""
        self.unanswered = False
        self.pending.answered()

    def repeats(self, now: float) -> bool:
        """Return whether to repeat the unanswered message now."""
        return (now <= self.ends or not self.live) and self.pending.due(now)

    def attribute(self, error: KvferryError) -> KvferryError:
        """Return the error with the receiving node's name in it if that node, or the path to it, caused the error.

        Routers receive the error from this node, so it must name the other node. A draining node accepts nothing new;
        its Draining becomes GrantRefused, since only this offer is refused."""
        if not isinstance(error, NodeLost | TransferFailed | GrantRefused | Draining):
            return error
        kind = GrantRefused if isinstance(error, Draining) else type(error)
        return kind(f"node {self.receiver}: {error.message}")

    def move(self, new: ShipState) -> None:
        """Change to a state that SHIP_MOVES allows."""
        assert new in SHIP_MOVES[self.state], f"{self.state} → {new} is not allowed"
        self.state = new


def too_long(purpose: GrantPurpose, size: int) -> KvferryError | None:
    """Return the error for a grant request of `size` bytes if it does not fit into one message, else None."""
    if size <= MAX_MESSAGE_BYTES:
        return None
    tokens = 0 if isinstance(purpose, Supply | EmbeddingSupply) else len(purpose.token_ids)
    text = f"{tokens} tokens do not fit into a grant request of {MAX_MESSAGE_BYTES} bytes"
    return InvalidRequest(text, param="prompt")


def has_sent(ship: Ship) -> bool:
    """Return whether all posted blocks are sent and more may follow."""
    return ship.state is ShipState.RUNNING and ship.blocks is not None and not ship.blocks.in_progress


def commit_obstacle(ship: Ship, covered: int) -> str:
    """Return why the ship cannot be committed; empty if it can.

    If `covered` is not 0, the granted blocks that were not posted are excluded from the ship."""
    if covered and ship.blocks is not None:
        ship.blocks.exclude_rest()
    if ship.blocks is not None and ship.blocks.complete:
        return ""
    posted, count = (ship.blocks.posted, ship.blocks.count) if ship.blocks else (0, 0)
    return f"commit after {posted} of {count} blocks"
