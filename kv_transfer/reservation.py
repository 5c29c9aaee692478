"""What the receiver remembers of one grant, and of the process it was made to."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kv_transfer.link import Peer
from kv_transfer.ports import TransferKey
from kv_transfer.states import GrantState
from protocol.messages import Commit, Job

REMEMBERED = 4096


@dataclass(slots=True, eq=False)
class Reservation:
    """One grant. in_flight: receives not completed; unanswered: the engine has not answered `reserve` yet; crcs: own
    checksums by prompt block index; summing: how many are still being taken."""

    key: TransferKey
    job: Job
    deadline: float
    state: GrantState = GrantState.NEW
    unanswered: bool = True
    first_block: int = 0
    count: int = 0
    in_flight: int = 0
    buffers: dict[int, object] = field(default_factory=dict)
    crcs: dict[int, int] = field(default_factory=dict)
    summing: int = 0
    commit: Commit | None = None

    @property
    def peer(self) -> Peer:
        return self.key[0]  # type: ignore[no-any-return]

    @property
    def transfer(self) -> int:
        return self.key[1]


class Connection:
    """What the receiver knows of one sending process: the nonce of its tags and the transfers it already asked for."""

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
