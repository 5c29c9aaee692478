"""Decides whether a node fetches a prefix from another node instead of computing it, and from which one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import nsmallest
from typing import NamedTuple

from kvferry.placement.blocks import cached_len, held_len
from kvferry.placement.tier_reads import own_read_s
from kvferry.placement.types import Demand, Holding, NodeView, Placement, unbroken
from kvferry.protocol.messages import Holder

HANDSHAKE_S = 0.003
"""Seconds for request, grant, commit and acknowledgement of a fetch between idle nodes."""
MIN_GAIN_S = 0.005
"""Minimum gain, in seconds, for which a node fetches: estimates of node speeds are not more accurate."""
CANDIDATES = 4
"""Number of holders considered: those with the longest prefix, and among equal ones the least busy."""
CHECK_TOKENS = 256
"""Tokens that a prefill node computes between two checks for requests; a fetch waits half of that on average."""


class Fetch(NamedTuple):
    """Fetch of a prefix from another node.

    holder      the node that supplies the blocks
    cached_len  tokens that the fetching node then has
    seconds     for the fetch and for computing the rest
    """

    holder: NodeView
    cached_len: int
    seconds: float


def holders(demand: Demand, nodes: Sequence[NodeView]) -> tuple[Holding, ...]:
    """Return the nodes to fetch from; none for a migrating stream, which brings its blocks along.

    Only kvferry's own engines fetch prefixes, not those behind adapters."""
    if not demand.fetches or demand.source:
        return ()
    candidates = [
        node
        for node in nodes
        if node.cached_len and node.role and node.cached_len >= node.lease.block_size and not node.lease.engine
    ]
    best = nsmallest(CANDIDATES, candidates, key=lambda n: (-n.cached_len, n.waiting_tokens, n.streams))
    held = [(node, held_len(node, demand)) for node in best]
    return tuple(Holding(node, tokens, fetch_s(node, tokens)) for node, tokens in held)


def fetching(node: NodeView, demand: Demand) -> Fetch | None:
    """Return the best fetch for the node; None if it is not faster than reading and computing without a fetch.

    It is called for every node, nearly all of which hold nothing."""
    own = cached_len(node, demand) if node.cached_len or demand.beside else 0
    total, rate = demand.total_len, node.rate
    best, limit_s = None, own_read_s(node, demand) - MIN_GAIN_S
    for holding in demand.holders:
        holder, held, seconds = holding
        if held <= own or (demand.broken and not unbroken(demand, holder.key, node.key)):
            continue
        seconds = (fetch_s(holder, held - own) if own else seconds) + (total - held) / rate
        if seconds < limit_s:
            best, limit_s = holding, seconds
    return Fetch(best.node, best.tokens, limit_s) if best else None


def with_fetch(demand: Demand, placement: Placement, nodes: Sequence[NodeView]) -> Placement:
    """Return the placement, with the holder that the prompt's node fetches from, if it does."""
    lease = placement.prefill or placement.decode
    fetch = next(fetching(node, demand) for node in nodes if node.lease is lease)
    if fetch is None:
        return placement
    source = fetch.holder.lease
    return replace(
        placement, cached_len=fetch.cached_len, holder=Holder(source.target, fetch.cached_len // source.block_size)
    )


def fetch_s(holder: NodeView, tokens: int) -> float:
    """Return the seconds to fetch this many tokens; the holder answers between two steps."""
    lease = holder.lease
    check_s = min(holder.waiting_tokens, CHECK_TOKENS) / 2 / holder.rate
    check_s += lease.rates.step_s / 2 if holder.streams else 0.0
    return HANDSHAKE_S + check_s + tokens // lease.block_size * holder.block_s
