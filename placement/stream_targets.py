"""Targets of inter-token latency: how many streams a decode node can run without exceeding a tenant's target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from kvferry.placement.blocks import EXPECTED_OUTPUT, missing_blocks
from kvferry.placement.pairs import DecodeHalf
from kvferry.placement.rejections import too_slow
from kvferry.placement.types import Demand, NodeView

ROUNDING = 1 + 1e-9
"""Tolerance for rounding errors of a target, which a float in milliseconds may not hold exactly."""


def streams_over(node: NodeView, itl_s: float) -> float:
    """Return the number of streams that must end before the node can take another one; 0 if none.

    An idle node always takes one, since waiting would not help."""
    if node.next_itl_s <= itl_s * ROUNDING:
        return 0
    rates, slots = node.lease.rates, node.lease.max_num_seqs or inf
    spare_s = itl_s * ROUNDING - (rates.alone_s or rates.step_s)
    more = spare_s // rates.stream_s if rates.alone_s and rates.stream_s else inf
    most = 1 + more if spare_s >= 0 else 1
    return max(1, node.streams + 1 - min(slots, most))


def within_target(demand: Demand, halves: Iterable[Sequence[DecodeHalf]]) -> list[list[DecodeHalf]]:
    """Return the decode nodes that can take the stream within its target.

    Raises TargetMissed without such a node, but returns all for a stream that has begun, which must continue."""
    given, limit_s = [list(half) for half in halves], demand.itl_s * ROUNDING
    fast = [[each for each in half if each[-1].next_itl_s <= limit_s] for half in given]
    if demand.background:
        fast = [[each for each in half if not _delayed(each[-1], demand)] for half in fast]
    if any(fast):
        return fast
    if demand.recovers:
        return given
    raise too_slow(min(_until_s(each[-1], demand.itl_s) for half in given for each in half))


def idle_prefills(prefills: Sequence[NodeView]) -> list[NodeView]:
    """Return the nodes on which no prompt waits; raise TargetMissed without one if there are any nodes."""
    idle = [node for node in prefills if not node.waiting_tokens]
    if prefills and not idle:
        raise too_slow(min(node.queue_s for node in prefills))
    return idle


def _delayed(node: NodeView, demand: Demand) -> bool:
    """Return whether a background request would wait on the node or delay other requests."""
    return node.waiting_tokens > 0 or missing_blocks(node, demand) > 0


def _until_s(node: NodeView, itl_s: float) -> float:
    """Return the expected seconds until the node can take another stream: its streams end evenly spread."""
    rates = node.lease.rates
    token_s = rates.alone_s + rates.stream_s * (node.streams - 1) if rates.alone_s else rates.step_s
    return streams_over(node, itl_s) * EXPECTED_OUTPUT * token_s / max(1, node.streams)
