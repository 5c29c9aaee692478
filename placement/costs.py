"""What a placement costs, in seconds, from a node's load, its learned rates and what it already holds."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.messages import NodeLease

NodeKey = tuple[str, int]
"""(node id, epoch)"""

HANDOFF_S = 0.002
"""Grant, commit and acknowledgement of one ship between idle nodes."""
CHUNK_TOKENS = 256
"""The last chunk of a prompt is shipped after its last token was computed, so its bytes are always exposed."""
STREAM_SHARE = 0.05
"""By how much one more running stream stretches a decode step."""
EXPECTED_OUTPUT = 128
"""Tokens a running request is expected to hold its blocks for; used only while a decode node has no room."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A live node as one placement sees it: its lease, and its figures with the router's own bookings counted.

    cached_len      leading tokens of this request that the node holds
    waiting_tokens  prompt tokens queued there and not yet computed
    streams         requests that run there or will
    pending_blocks  blocks granted or asked for by requests that do not run yet
    """

    lease: NodeLease
    cached_len: int = 0
    waiting_tokens: int = 0
    streams: int = 0
    pending_blocks: int = 0

    @property
    def key(self) -> NodeKey:
        return (self.lease.node_id, self.lease.epoch)


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be placed, and where it may not go.

    total_len     tokens whose KV must exist before the next token can be drawn
    prompt_only   the request ends with its next token: no decode node is needed
    local_tokens  with at most this many uncached tokens on a decode node, prefill there whatever it costs
    excluded      nodes that failed this request
    pinned        the prefill node to use if it is there
    local_only    no prefill node
    """

    total_len: int
    prompt_only: bool = False
    local_tokens: int = 0
    excluded: frozenset[NodeKey] = frozenset()
    pinned: NodeKey | None = None
    local_only: bool = False


def wait_s(node: NodeView, demand: Demand) -> float:
    """Seconds before a decode node starts on a request that is ready to run there: the step under way, stretched by the
    streams beside it, and, when the pool is full, the time until enough blocks come back."""
    step_s = node.lease.rates.step_s
    wait = step_s * (1 + STREAM_SHARE * node.streams)
    missing = missing_blocks(demand, node)
    if missing > 0:
        in_use = max(1, node.lease.load.active_blocks)
        wait += missing / in_use * EXPECTED_OUTPUT * step_s
    return wait


def compute_s(node: NodeView, demand: Demand) -> float:
    """Seconds to compute the tokens the node does not hold."""
    return uncached_len(demand, node) / _prefill_rate(node)


def queue_s(node: NodeView) -> float:
    """Seconds until the prompt tokens already queued on the node are computed."""
    return node.waiting_tokens / _prefill_rate(node)


def exposed_s(prefill: NodeView, decode: NodeView, demand: Demand) -> float:
    """Seconds of shipping that computing cannot hide: blocks decode holds are not shipped, and all others travel while
    later ones are computed, except the last chunk's."""
    lease = prefill.lease
    blocks = blocks_for(demand.total_len, decode) - cached_len(demand, decode) // lease.block_size
    block_s = lease.block_bytes / max(lease.rates.ship_bytes_per_s, 1.0)
    last = min(blocks, -(-CHUNK_TOKENS // lease.block_size))
    return max(blocks * block_s - compute_s(prefill, demand), last * block_s, 0.0)


def harm_s(decode: NodeView, demand: Demand) -> float:
    """Seconds that computing the prompt takes from the streams of a decode node, all together. One stream is counted
    that is not there yet: an idle decode node is kept free for the next one."""
    return (decode.streams + 1) * compute_s(decode, demand)


def fits(demand: Demand, node: NodeView) -> bool:
    total = node.lease.load.total_blocks
    return total == 0 or blocks_for(demand.total_len + 1, node) <= total


def demanded_blocks(demand: Demand, node: NodeView) -> int:
    return node.lease.load.active_blocks + node.pending_blocks + new_blocks(demand, node)


def missing_blocks(demand: Demand, node: NodeView) -> int:
    load = node.lease.load
    if load.total_blocks == 0:
        return 0
    promised = max(0, node.pending_blocks - load.granted_blocks)
    held = cached_len(demand, node) // node.lease.block_size
    room = load.free_blocks + max(0, load.cached_blocks - held) - promised
    return max(0, new_blocks(demand, node) - room)


def new_blocks(demand: Demand, node: NodeView) -> int:
    return blocks_for(demand.total_len + 1, node) - cached_len(demand, node) // node.lease.block_size


def blocks_for(tokens: int, node: NodeView) -> int:
    return -(-tokens // node.lease.block_size)


def cached_len(demand: Demand, node: NodeView) -> int:
    """Whole blocks only, and at least one token is always computed."""
    size = node.lease.block_size
    return min(node.cached_len, max(0, demand.total_len - 1)) // size * size


def uncached_len(demand: Demand, node: NodeView) -> int:
    return demand.total_len - cached_len(demand, node)


def _prefill_rate(node: NodeView) -> float:
    return max(node.lease.rates.prefill_tokens_per_s, 1.0)
