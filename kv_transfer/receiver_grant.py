"""State machine of a grant (blocks reserved for one ship) on the receiving side; Receiver drives it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry.kv_transfer.incoming import Incoming
from kvferry.kv_transfer.link import Peer
from kvferry.kv_transfer.ports import TransferKey
from kvferry.protocol.errors import DeadlineExceeded, Fenced, Incompatible, KvferryError, TransferFailed
from kvferry.protocol.link_messages import Commit, Grant, GrantPurpose, GrantRequest

COMMIT_TIMEOUT_S = 15.0
"""Maximum time between the last block's arrival and the commit, in seconds; a later commit counts as lost."""


class GrantState(StrEnum):
    """State of a grant, until it is handed over to the engine (READY).

    LANDED: every receive completed. QUIESCING: failed; waits for receives in flight or for the engine's answer. QUIET:
    no receive touches memory any more."""

    NEW = "new"
    GRANTED = "granted"
    RECEIVING = "receiving"
    LANDED = "landed"
    READY = "ready"
    FAILED = "failed"
    QUIESCING = "quiescing"
    QUIET = "quiet"


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
GRANT_LIVE = frozenset({GrantState.NEW, GrantState.GRANTED, GrantState.RECEIVING, GrantState.LANDED})


@dataclass(slots=True, eq=False)
class OpenGrant:
    """State of one GrantRequest.

    unanswered: the engine has not answered `reserve` yet. message, blocks: set when the engine grants."""

    key: TransferKey
    purpose: GrantPurpose
    deadline: float
    state: GrantState = GrantState.NEW
    unanswered: bool = True
    message: Grant | None = None
    blocks: Incoming | None = None
    commit: Commit | None = None

    @property
    def peer(self) -> Peer:
        """Return the connection of the sender."""
        return self.key[0]  # type: ignore[no-any-return]

    @property
    def transfer(self) -> int:
        """Return the transfer id of the sender."""
        return self.key[1]

    @property
    def count(self) -> int:
        """Return the number of granted blocks."""
        return self.blocks.count if self.blocks else 0

    @property
    def in_flight(self) -> int:
        """Return the number of receives that have not completed."""
        return self.blocks.in_flight if self.blocks else 0

    @property
    def live(self) -> bool:
        """Return whether the grant can still become ready."""
        return self.state in GRANT_LIVE

    def deadline_error(self) -> KvferryError:
        """Return the error for a passed deadline, which says what did not arrive in time."""
        if self.state is GrantState.LANDED and self.count:
            return TransferFailed(f"no commit within {COMMIT_TIMEOUT_S:g} s of the last block")
        return DeadlineExceeded("the request's deadline passed before its blocks arrived")

    def move(self, new: GrantState) -> None:
        """Change to a state that GRANT_MOVES allows."""
        assert new in GRANT_MOVES[self.state], f"{self.state} → {new} is not allowed"
        self.state = new


def mismatch(request: GrantRequest, fingerprint: str, epoch: int) -> KvferryError | None:
    """Return the error for a request that this process cannot grant, or None."""
    if request.fingerprint != fingerprint:
        return Incompatible(f"this node's fingerprint is {fingerprint}, but the sender expects {request.fingerprint}")
    if request.epoch != epoch:
        return Fenced(f"this node is at epoch {epoch}; the request is for {request.epoch}")
    return None
