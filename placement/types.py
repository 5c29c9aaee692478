"""Input and output types of a placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import Holder

NodeKey = tuple[str, int]
"""(node id, epoch)"""
Pair = tuple[NodeKey | None, NodeKey | None]
"""(prefill, decode); None stands for all."""

BACKLOG = 4
"""A decode node takes requests until the blocks in use and asked for reach this multiple of its pool."""
UNKNOWN_BLOCKS = 10**12
"""A pool that does not tell its size is no limit."""
STREAM_SHARE = 0.05
"""By how much one more running stream stretches a decode step."""


class TierPrefix(NamedTuple):
    """Leading tokens of a request that a node must read first, and the seconds that a block of them takes."""

    tokens: int
    block_s: float


@dataclass(frozen=True, slots=True)
class NodeView:
    """A live node as one placement sees it: its lease, and its figures with the router's own bookings counted.

    cached_len      leading tokens of this request that the node holds
    waiting_tokens  prompt tokens queued there and not yet computed
    streams         requests that run there or will
    pending_blocks  blocks granted or asked for by requests that do not run yet
    kept            what slower memories of its own have of this request, the quickest first
    placed          when the node was last chosen, as a count that only grows; equal nodes take turns by it

    What no request changes is figured once, with the view, for each placement looks at every node:

    key             of the node
    role            of the node if it is ready, else empty
    bare_size       tokens of a block if it holds nothing of this request, else 0
    turn            of equal nodes the one with the least comes first
    counted         what equal nodes have alike, but for cached_len
    rate            prompt tokens computed in a second
    queue_s         seconds until the prompt tokens that wait there are computed
    step_s          seconds of a step, stretched by the streams
    block_s         seconds to ship a block from there
    gain_s          by which reading a token from the store that nodes share is quicker than computing it, if it is
    total_blocks    of the pool
    pool_tokens     that it holds
    free_blocks     free and not promised to others
    unasked_blocks  free, and not needed by what waits there
    ready_blocks    that a request which finds nothing there may have at once
    spare_blocks    that may still be asked of a decode node; below zero when it has been asked for more than it takes
    """

    lease: NodeLease
    cached_len: int = 0
    waiting_tokens: int = 0
    streams: int = 0
    pending_blocks: int = 0
    placed: int = 0
    kept: tuple[TierPrefix, ...] = ()
    key: NodeKey = field(init=False, repr=False, compare=False)
    role: str = field(init=False, repr=False, compare=False)
    bare_size: int = field(init=False, repr=False, compare=False)
    turn: tuple[int, str] = field(init=False, repr=False, compare=False)
    counted: tuple[int, int, int] = field(init=False, repr=False, compare=False)
    rate: float = field(init=False, repr=False, compare=False)
    queue_s: float = field(init=False, repr=False, compare=False)
    step_s: float = field(init=False, repr=False, compare=False)
    block_s: float = field(init=False, repr=False, compare=False)
    gain_s: float = field(init=False, repr=False, compare=False)
    total_blocks: int = field(init=False, repr=False, compare=False)
    pool_tokens: int = field(init=False, repr=False, compare=False)
    free_blocks: int = field(init=False, repr=False, compare=False)
    unasked_blocks: int = field(init=False, repr=False, compare=False)
    ready_blocks: int = field(init=False, repr=False, compare=False)
    spare_blocks: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lease, load, rates, put = self.lease, self.lease.load, self.lease.rates, object.__setattr__
        rate, total = max(rates.prefill_tokens_per_s, 1.0), load.total_blocks or UNKNOWN_BLOCKS
        free = load.free_blocks - max(0, self.pending_blocks - load.granted_blocks)
        put(self, "key", (lease.node_id, lease.epoch))
        put(self, "role", lease.role if lease.state == "ready" else "")
        put(self, "bare_size", 0 if self.cached_len or self.kept else lease.block_size)
        put(self, "turn", (self.placed, lease.node_id))
        put(self, "counted", (self.waiting_tokens, self.streams, self.pending_blocks))
        put(self, "rate", rate)
        put(self, "queue_s", self.waiting_tokens / rate)
        put(self, "step_s", rates.step_s * (1 + STREAM_SHARE * self.streams))
        put(self, "block_s", lease.block_bytes / max(rates.ship_bytes_per_s, 1.0))
        read_s = rates.store_block_s / lease.block_size
        put(self, "gain_s", max(0.0, 1 / rate - read_s) if read_s else 0.0)
        put(self, "total_blocks", total)
        put(self, "pool_tokens", total * lease.block_size)
        put(self, "free_blocks", free)
        put(self, "unasked_blocks", max(0, load.free_blocks - self.waiting_tokens // lease.block_size))
        put(self, "ready_blocks", free + load.cached_blocks if load.total_blocks else UNKNOWN_BLOCKS)
        put(self, "spare_blocks", BACKLOG * total - load.active_blocks - self.pending_blocks)


class Holding(NamedTuple):
    """A node that others may fetch a prompt's blocks from: tokens that it holds in whole blocks, and the seconds until
    all of them are elsewhere."""

    node: NodeView
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of one placement, with its exclusions.

    total_len     tokens whose KV must exist before the next token can be drawn, at least 1
    prompt_only   the request ends with its next token: no decode node is needed
    local_tokens  with at most this many uncached tokens on a decode node, prefill there whatever it costs
    excluded      nodes that nothing may go to: they failed this request, or others
    broken        pairs between which no blocks may be shipped
    doubts        seconds by which a node is worse than it looks
    recovers      its stream began: it comes before what waits, in every queue, and is never sent away for want of room
    pinned        the prefill node to use if it is there
    beside        the node that has the K/V of all tokens but the last, for a request that forks from one there
    local_only    no prefill node
    source        the decode node whose blocks it takes along, for a stream that moves
    worth         times that a token which leaves a cache for this request would have been reused
    adapter       id of the one that the nodes must hold; empty: none
    model         of the nodes that are asked, for errors
    fetches       whether nodes may fetch what others hold of the prompt
    holders       who they are that do, found by `place`
    stored_len    leading tokens in whole blocks, never the last one, that a store has which nodes share
    """

    total_len: int
    prompt_only: bool = False
    local_tokens: int = 0
    excluded: frozenset[NodeKey] = frozenset()
    broken: frozenset[Pair] = frozenset()
    doubts: Mapping[NodeKey, float] = field(default_factory=dict)
    recovers: bool = False
    pinned: NodeKey | None = None
    local_only: bool = False
    source: NodeKey | None = None
    model: str = ""
    adapter: str = ""
    beside: NodeKey | None = None
    fetches: bool = False
    holders: tuple[Holding, ...] = ()
    stored_len: int = 0
    worth: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice: prefill None means prefilled on decode, decode None means finished on prefill.

    `cached_len`: tokens expected to be reused where the prompt is computed. `first_token_s`: expected seconds to the
    first token. `holder`: from where they are fetched there, if it has not all of them itself."""

    prefill: NodeLease | None
    decode: NodeLease | None
    cached_len: int
    cost_s: float
    first_token_s: float
    holder: Holder | None = None


def unbroken(demand: Demand, sender: NodeKey, receiver: NodeKey) -> bool:
    """Return whether blocks may go from the one to the other."""
    return demand.broken.isdisjoint(((sender, receiver), (sender, None), (None, receiver)))
