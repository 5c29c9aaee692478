"""Events that the engine emits for its worker: output, failures, reservations, block changes, canaries, step figures.

They are plain values, because they leave the engine thread."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.engine.cache_use import IdleStats
from kvferry.engine.request import Key
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.messages import TokenDelta
from kvferry.protocol.process_names import NodeName


@dataclass(frozen=True, slots=True)
class Generated:
    """New output of an attempt.

    `queue_s` and `compute_s` are set with its first output on this node. `handover`: the transfer whose commit
    continues the request on its decode node."""

    key: Key
    router_id: str
    delta: TokenDelta
    queue_s: float = 0.0
    compute_s: float = 0.0
    handover: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt ended with an error."""

    key: Key
    router_id: str
    error: KvferryError


@dataclass(frozen=True, slots=True)
class Computed:
    """Blocks of a transfer that are ready to be sent: (index in the prompt, block id)."""

    transfer: int
    blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Reserved:
    """A request whose prompt arrives by a grant (`owner`) got its blocks.

    Receives may be posted into `block_ids` (prompt blocks first_block and later)."""

    owner: Hashable
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReservationFailed:
    """A request of a grant was refused or dropped. `granted`: it had blocks, which stay held."""

    owner: Hashable
    error: KvferryError
    granted: bool = False


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """Blocks that became findable or were evicted: hashes and rows (`protocol.index_rows`) for the block index.

    kept: hashes of blocks that were findable before, and that tiers keep from now on."""

    stored: Mapping[bytes, bytes]
    removed: Mapping[bytes, bytes]
    kept: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request got its blocks for the first time; its prompt was looked up in the prefix cache (tokens)."""

    key: Key
    queue_s: float
    queried: int
    hit: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """Figures of one step.

    Seconds; tokens computed by phase, and output tokens made; preemptions and evictions; drafts computed and correct;
    figures of idle blocks; checkpoints of recurrent states saved and loaded."""

    seconds: float
    prefill_tokens: int
    decode_tokens: int
    preempted: int
    evicted: int
    drafted: int = 0
    accepted: int = 0
    idle: IdleStats | None = None
    saved: int = 0
    loaded: int = 0


@dataclass(frozen=True, slots=True)
class CanaryChecked:
    """Result of a canary check of a transfer from `sender`, which brought the K/V of `tokens` tokens.

    outcome: agreed, differed, or dropped before it was known. distance, tolerated: see engine.output_tolerance."""

    key: Key
    router_id: str
    sender: NodeName
    outcome: str
    tokens: int
    distance: float
    tolerated: float


Event = (
    Generated | Failed | Computed | Reserved | ReservationFailed | BlocksChanged | Admitted | Stepped | CanaryChecked
)
