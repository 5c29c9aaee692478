"""What a placement is told and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.lease import NodeLease

NodeKey = tuple[str, int]
"""(node id, epoch)"""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A live node as one placement sees it: its lease, and its figures with the router's own bookings counted.

    cached_len      leading tokens of this request that the node holds
    waiting_tokens  prompt tokens queued there and not yet computed
    streams         requests that run there or will
    pending_blocks  blocks granted or asked for by requests that do not run yet
    placed          when the node was last chosen, as a count that only grows; equal nodes take turns by it
    """

    lease: NodeLease
    cached_len: int = 0
    waiting_tokens: int = 0
    streams: int = 0
    pending_blocks: int = 0
    placed: int = 0

    @property
    def key(self) -> NodeKey:
        return (self.lease.node_id, self.lease.epoch)


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be placed, and where it may not go.

    total_len     tokens whose KV must exist before the next token can be drawn, at least 1
    prompt_only   the request ends with its next token: no decode node is needed
    local_tokens  with at most this many uncached tokens on a decode node, prefill there whatever it costs
    excluded      nodes that failed this request
    pinned        the prefill node to use if it is there
    beside        the node that has the K/V of all tokens but the last, for a request that forks from one there
    local_only    no prefill node
    adapter       id of the one that the nodes must hold; empty: none
    model         of the nodes that are asked, for errors
    """

    total_len: int
    prompt_only: bool = False
    local_tokens: int = 0
    excluded: frozenset[NodeKey] = frozenset()
    pinned: NodeKey | None = None
    local_only: bool = False
    model: str = ""
    adapter: str = ""
    beside: NodeKey | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice: prefill None means prefilled on decode, decode None means finished on prefill. `cached_len`: tokens
    expected to be reused where the prompt is computed. `first_token_s`: expected seconds to the first token."""

    prefill: NodeLease | None
    decode: NodeLease | None
    cached_len: int
    cost_s: float
    first_token_s: float
