"""A grant as the receiver knows it: its states, with the moves that are allowed, and what is remembered of it and of
the process it was made to.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from kv_transfer.incoming import Incoming
from kv_transfer.link import Peer
from kv_transfer.ports import TransferKey
from protocol.link_messages import Commit
from protocol.messages import Job

REMEMBERED = 4096


class GrantState(StrEnum):
    """Up to the hand-over to the engine (READY). LANDED: every receive completed; QUIESCING: failed, own receives or
    the engine's answer are awaited; QUIET: no receive touches memory any more."""

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
    """What one GrantRequest led to. unanswered: the engine has not answered `reserve` yet; blocks: once it granted."""

    key: TransferKey
    job: Job
    deadline: float
    state: GrantState = GrantState.NEW
    unanswered: bool = True
    blocks: Incoming | None = None
    commit: Commit | None = None

    @property
    def peer(self) -> Peer:
        return self.key[0]  # type: ignore[no-any-return]

    @property
    def transfer(self) -> int:
        return self.key[1]

    @property
    def in_flight(self) -> int:
        """Posted receives not completed."""
        return self.blocks.in_flight if self.blocks else 0

    @property
    def live(self) -> bool:
        """Whether it can still become ready."""
        return self.state in GRANT_LIVE

    def move(self, new: GrantState) -> None:
        """To a state that the table allows."""
        assert new in GRANT_MOVES[self.state], f"{self.state} → {new} is not allowed"
        self.state = new


class SendingProcess:
    """The nonce of the tags of one connected sender, and the transfers it already asked for."""

    def __init__(self, nonce: int):
        self.nonce = nonce
        self._seen: set[int] = set()
        self._order: deque[int] = deque()

    def is_new(self, transfer: int) -> bool:
        """True once per transfer id (the last REMEMBERED are remembered): a repeated request must not reserve twice."""
        if transfer in self._seen:
            return False
        self._seen.add(transfer)
        self._order.append(transfer)
        if len(self._order) > REMEMBERED:
            self._seen.discard(self._order.popleft())
        return True
