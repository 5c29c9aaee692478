"""What the sender remembers of one ship."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.link import Peer
from kv_transfer.states import ShipState
from protocol.messages import Grant, Job, TokenDelta


@dataclass(slots=True, eq=False)
class Ship:
    """One offer. in_flight: posted sends not ended; unanswered: neither Grant nor Refusal came yet; crcs: of the posted
    blocks by prompt block index; summing: how many of them are still being taken."""

    transfer: int
    job: Job
    peer: Peer
    deadline: float
    state: ShipState = ShipState.OFFERED
    unanswered: bool = True
    grant: Grant | None = None
    crcs: dict[int, int] = field(default_factory=dict)
    summing: int = 0
    in_flight: int = 0
    bytes: int = 0
    first: TokenDelta | None = None
    posted_at: float | None = None
    committed_at: float = 0.0
