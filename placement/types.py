"""Input and output types of a placement: NodeView, Demand, Holding and Placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from kvferry.protocol.fast_init import fast_init
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import Holder

NodeKey = tuple[str, int]
"""(node id, epoch)"""
Pair = tuple[NodeKey | None, NodeKey | None]
"""(prefill, decode); None stands for all nodes."""

MAX_BACKLOG = 4
"""Multiple of a decode node's pool up to which it accepts requests, by used and requested blocks."""
UNKNOWN_BLOCKS = 10**12
"""Number of blocks assumed for a pool of unknown size, so that it never limits."""
STREAM_SHARE = 0.05
"""Relative increase of a decode step's time per running stream."""
OVERTAKEN = 0.25
"""Relative increase of a prompt's wait by later, shorter prompts that overtake it (see `engine.request_table`)."""


class TierPrefix(NamedTuple):
    """Leading tokens of a request that a node must read from a tier, and the seconds to read one block."""

    tokens: int
    block_s: float


@fast_init
@dataclass(frozen=True, slots=True)
class NodeView:
    """State of a live node for one placement: its lease, with the router's own dispatched requests added.

    cached_len        leading tokens of this request that the node holds
    waiting_tokens    prompt tokens queued there, not computed yet
    streams           requests that run there or will run
    pending_blocks    blocks granted to or requested for requests that do not run yet
    kept              prefixes of this request in the node's own tiers, the fastest first
    placed            increasing count at which the node was last chosen; equal nodes take turns by it

    The following are derived once per view, because each placement reads them for every node:

    key               node id and epoch
    role              role of the node if it is ready, else empty
    plain_block_size  tokens of a block if the node holds nothing of this request, else 0
    turn              order of equal nodes; the lowest comes first
    counted           counts that equal nodes have in common, besides cached_len
    rate              prompt tokens computed per second
    queue_s           seconds until the queued prompt tokens are computed
    step_s            seconds of a decode step, stretched by the streams
    next_itl_s        seconds between tokens with one more stream; 0 on an idle node, infinite without a free sequence
    slot block_s           seconds to ship a block from there gain_s            seconds saved per token by reading from
    the shared store instead of computing; 0 if none total_blocks      blocks of the pool pool_tokens       capacity of
    the pool in tokens free_blocks       free blocks that are not reserved for other requests unclaimed_blocks  free
    blocks that queued prompts do not need ready_blocks      blocks available at once to a request with nothing cached
    there spare_blocks      blocks for which a decode node still accepts requests; negative beyond its limit
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
    plain_block_size: int = field(init=False, repr=False, compare=False)
    turn: tuple[int, str] = field(init=False, repr=False, compare=False)
    counted: tuple[int, int, int] = field(init=False, repr=False, compare=False)
    rate: float = field(init=False, repr=False, compare=False)
    queue_s: float = field(init=False, repr=False, compare=False)
    step_s: float = field(init=False, repr=False, compare=False)
    next_itl_s: float = field(init=False, repr=False, compare=False)
    block_s: float = field(init=False, repr=False, compare=False)
    gain_s: float = field(init=False, repr=False, compare=False)
    total_blocks: int = field(init=False, repr=False, compare=False)
    pool_tokens: int = field(init=False, repr=False, compare=False)
    free_blocks: int = field(init=False, repr=False, compare=False)
    unclaimed_blocks: int = field(init=False, repr=False, compare=False)
    ready_blocks: int = field(init=False, repr=False, compare=False)
    spare_blocks: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        made: Any = self  # not frozen yet, see `fast_init`
        lease, load, rates = self.lease, self.lease.load, self.lease.rates
        rate, total = max(rates.prefill_tokens_per_s, 1.0), load.total_blocks or UNKNOWN_BLOCKS
        free = load.free_blocks - max(0, self.pending_blocks - load.granted_blocks)
        made.key = (lease.node_id, lease.epoch)
        made.role = lease.role if lease.state == "ready" else ""
        made.plain_block_size = 0 if self.cached_len or self.kept else lease.block_size
        made.turn = (self.placed, lease.node_id)
        made.counted = (self.waiting_tokens, self.streams, self.pending_blocks)
        made.rate = rate
        made.queue_s = self.waiting_tokens / rate
        made.step_s = rates.step_s * (1 + STREAM_SHARE * self.streams)
        made.next_itl_s = _next_itl_s(lease, self.streams)
        made.block_s = lease.block_bytes / max(rates.ship_bytes_per_s, 1.0)
        read_s = rates.store_block_s / lease.block_size
        made.gain_s = max(0.0, 1 / rate - read_s) if read_s else 0.0
        made.total_blocks = total
        made.pool_tokens = _longest_chain(lease, total) * lease.block_size
        made.free_blocks = free
        made.unclaimed_blocks = max(0, load.free_blocks - self.waiting_tokens // lease.block_size)
        made.ready_blocks = free + load.cached_blocks if load.total_blocks else UNKNOWN_BLOCKS
        made.spare_blocks = MAX_BACKLOG * total - load.active_blocks - self.pending_blocks


def _longest_chain(lease: NodeLease, total_blocks: int) -> int:
    """Return the blocks of the longest chain for which the pool has room, beside its state or its windows' pages."""
    return max(total_blocks - lease.state_blocks * (lease.window_pages or 1), total_blocks // (1 + lease.state_blocks))


def _next_itl_s(lease: NodeLease, streams: int) -> float:
    """Return the expected seconds between the tokens of each stream once another one runs; see NodeView.

    A node behind an adapter that does not report how much each stream adds is judged by its recent streams."""
    if not streams:
        return 0.0
    if 0 < lease.max_num_seqs <= streams:
        return inf
    rates = lease.rates
    return rates.alone_s + rates.stream_s * streams if rates.alone_s else rates.step_s


class Holding(NamedTuple):
    """Node from which other nodes may fetch a prompt's blocks.

    tokens: number of tokens held in whole blocks. seconds: time to fetch them all."""

    node: NodeView
    tokens: int
    seconds: float


@fast_init
@dataclass(frozen=True, slots=True)
class Demand:
    """Request of one placement, with its constraints.

    total_len     tokens whose KV must exist before the next token can be sampled, at least 1
    prompt_only   the request ends with its next token: no decode node is needed
    local_tokens  a decode node with at most this many uncached tokens computes the prompt itself, whatever it costs
    excluded      nodes that may not be used, since they failed this or other requests
    broken        pairs that may not ship blocks
    penalties     penalty of suspected nodes, in seconds
    recovers      its stream has begun: it goes to the front of every queue and is never rejected for lack of capacity
    pinned        prefill node to use if it is usable
    beside        node that has the KV of all tokens but the last, for a request that forks from one there
    local_only    use no prefill node
    source        decode node whose blocks the request takes along, for a migrating stream
    worth         expected number of reuses of a cached token
    itl_s         target of the mean seconds between its tokens; infinite: none
    background    it must delay no other request: it goes only where no prompt waits, and slots and blocks are free
    adapter       id of the adapter that the nodes must have; empty: none
    modalities    media that the nodes must take
    model         name of the model, for errors
    fetches       whether nodes may fetch blocks of the prompt from others
    holders       nodes to fetch from, found by `place`
    stored_len    leading tokens in whole blocks, without the last token, that the shared store has
    """

    total_len: int
    prompt_only: bool = False
    local_tokens: int = 0
    excluded: frozenset[NodeKey] = frozenset()
    broken: frozenset[Pair] = frozenset()
    penalties: Mapping[NodeKey, float] = field(default_factory=dict)
    recovers: bool = False
    pinned: NodeKey | None = None
    local_only: bool = False
    source: NodeKey | None = None
    model: str = ""
    adapter: str = ""
    modalities: frozenset[str] = frozenset()
    beside: NodeKey | None = None
    fetches: bool = False
    holders: tuple[Holding, ...] = ()
    stored_len: int = 0
    worth: float = 0.0
    itl_s: float = inf
    background: bool = False


@fast_init
@dataclass(frozen=True, slots=True)
class Placement:
    """Nodes chosen for a request.

    prefill        None: the decode node computes the prompt
    decode         None: the request ends on the prefill node
    cached_len     tokens that the node that computes the prompt is expected to reuse
    cost_s         estimated cost, in seconds
    first_token_s  expected seconds to the first token
    queue_s        the part of first_token_s spent behind earlier prompts
    holder         node from which the prompt's node fetches blocks, if it does
    """

    prefill: NodeLease | None
    decode: NodeLease | None
    cached_len: int
    cost_s: float
    first_token_s: float
    holder: Holder | None = None
    queue_s: float = 0.0

    @property
    def promised_s(self) -> float:
        """Return the seconds to the first token that can be promised, though other prompts may pass this one."""
        return self.first_token_s + OVERTAKEN * self.queue_s


def unbroken(demand: Demand, sender: NodeKey, receiver: NodeKey) -> bool:
    """Return whether blocks may be shipped from `sender` to `receiver`."""
    return demand.broken.isdisjoint(((sender, receiver), (sender, None), (None, receiver)))
