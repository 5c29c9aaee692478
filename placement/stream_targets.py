"""Targets of the time between tokens: how many streams a decode node runs without exceeding one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from kvferry.placement.blocks import EXPECTED_OUTPUT, missing_blocks
from kvferry.placement.pairs import Ready
from kvferry.placement.rejections import too_slow
from kvferry.placement.types import Demand, NodeView

ROUNDING = 1e-6
"""Tolerance, in streams, for rounding errors of learned rates."""


def most_streams(node: NodeView, itl_s: float) -> float:
    """Return how many streams the node runs with at most `itl_s` seconds between the tokens of each.

    It is at least one: no later time is better for a stream than an idle node. A node whose rates do not tell what
    streams add to a step, behind an adapter, takes more streams while recent ones met the target."""
    rates, seats = node.lease.rates, node.lease.max_num_seqs or inf
    if not rates.alone_s:
        return seats if rates.step_s <= itl_s else 1
    spare_s = itl_s - rates.alone_s
    if not rates.stream_s:
        return seats if spare_s >= 0 else 1
    return min(seats, max(1, 1 + (spare_s / rates.stream_s + ROUNDING) // 1))


def streams_over(node: NodeView, itl_s: float) -> float:
    """Return how many streams must end before the node can take another one; 0 or less if none."""
    return node.streams + 1 - most_streams(node, itl_s)


def within_target(demand: Demand, halves: Iterable[Sequence[Ready]]) -> list[list[Ready]]:
    """Return the decode nodes that can take the stream within its target.

    Raises TargetMissed without such a node, but returns all for a stream that has begun, which must go on."""
    given = [list(half) for half in halves]
    fast = [[each for each in half if _takes(each[-1], demand)] for half in given]
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


def _takes(node: NodeView, demand: Demand) -> bool:
    delays = demand.patient and (node.waiting_tokens or missing_blocks(node, demand) > 0)
    return not delays and streams_over(node, demand.itl_s) <= 0


def _until_s(node: NodeView, itl_s: float) -> float:
    """Return the expected seconds until the node can take another stream: its streams end evenly spread."""
    rates = node.lease.rates
    token_s = rates.alone_s + rates.stream_s * (node.streams - 1) if rates.alone_s else rates.step_s
    return max(0.0, streams_over(node, itl_s)) * EXPECTED_OUTPUT * token_s / max(1, node.streams)
