"""Decision whether a node fetches a prefix from another node instead of computing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import nsmallest
from typing import NamedTuple

from kvferry.placement.blocks import cached_len, whole_len
from kvferry.placement.tier_reads import by_itself_s
from kvferry.placement.types import Demand, Holding, NodeView, Placement, unbroken
from kvferry.protocol.messages import Holder

QUESTION_S = 0.003
"""Question, grant, commit and acknowledgement of a fetch between idle nodes."""
LEAST_GAIN_S = 0.005
"""Below which nothing is fetched: what is learned of nodes is not that exact."""
CANDIDATES = 4
"""Holders that are looked at: those of the longest prefix, and of these the least busy."""
TURN_TOKENS = 256
"""What a node that computes prompts does between two looks at what it is asked, half of it on average."""


class Fetch(NamedTuple):
    """holder: who gives; cached_len: tokens that are here then; seconds: until then, and until the rest is computed."""

    holder: NodeView
    cached_len: int
    seconds: float


def holders(demand: Demand, nodes: Sequence[NodeView]) -> tuple[Holding, ...]:
    """Whom others may fetch from. None for a stream that moves: it takes its blocks along."""
    if not demand.fetches or demand.source:
        return ()
    able = [node for node in nodes if node.cached_len and node.role and node.cached_len >= node.lease.block_size]
    best = nsmallest(CANDIDATES, able, key=lambda n: (-n.cached_len, n.waiting_tokens, n.streams))
    held = [(node, whole_len(node, demand)) for node in best]
    return tuple(Holding(node, tokens, fetch_s(node, tokens)) for node, tokens in held)


def fetching(node: NodeView, demand: Demand) -> Fetch | None:
    """The best that the node can do, where that is better than to compute all that it has not, or reads.

    Asked for every node, nearly all of which hold nothing."""
    own = cached_len(node, demand) if node.cached_len or demand.beside else 0
    total, rate = demand.total_len, node.rate
    best, limit_s = None, by_itself_s(node, demand) - LEAST_GAIN_S
    for holding in demand.holders:
        holder, held, seconds = holding
        if held <= own or (demand.broken and not unbroken(demand, holder.key, node.key)):
            continue
        seconds = (fetch_s(holder, held - own) if own else seconds) + (total - held) / rate
        if seconds < limit_s:
            best, limit_s = holding, seconds
    return Fetch(best.node, best.tokens, limit_s) if best else None


def with_fetch(demand: Demand, placement: Placement, nodes: Sequence[NodeView]) -> Placement:
    """The placement, which says from where the prompt's node fetches if it does."""
    lease = placement.prefill or placement.decode
    fetch = next(fetching(node, demand) for node in nodes if node.lease is lease)
    if fetch is None:
        return placement
    gives = fetch.holder.lease
    return replace(
        placement, cached_len=fetch.cached_len, holder=Holder(gives.target, fetch.cached_len // gives.block_size)
    )


def fetch_s(holder: NodeView, tokens: int) -> float:
    """Seconds until so many of its tokens are elsewhere: it answers between two of its steps."""
    lease = holder.lease
    turn_s = min(holder.waiting_tokens, TURN_TOKENS) / 2 / holder.rate
    turn_s += lease.rates.step_s / 2 if holder.streams else 0.0
    return QUESTION_S + turn_s + tokens // lease.block_size * holder.block_s
