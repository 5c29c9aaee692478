"""Cost terms of a request on one node, in seconds: queue, computing, waiting, and delay of other requests."""

from __future__ import annotations

from kvferry.placement.blocks import freed_per_s, missing_blocks
from kvferry.placement.cache_value import displaced_s
from kvferry.placement.fetching import fetching
from kvferry.placement.tier_reads import own_read_s
from kvferry.placement.types import Demand, NodeView

HANDOFF_S = 0.002
"""Seconds for grant, commit and acknowledgement of one ship between idle nodes."""


def queue_s(node: NodeView, demand: Demand) -> float:
    """Return the seconds until the prompt tokens queued ahead of the request are computed."""
    return 0.0 if demand.recovers else node.queue_s


def penalty_s(node: NodeView, demand: Demand) -> float:
    """Return the penalty of a suspected node, in seconds."""
    return demand.penalties.get(node.key, 0.0) if demand.penalties else 0.0


def compute_s(node: NodeView, demand: Demand) -> float:
    """Return the seconds to compute the tokens the node lacks, after reading or fetching some if that is faster."""
    if demand.holders and (fetch := fetching(node, demand)):
        return fetch.seconds
    return own_read_s(node, demand)


def wait_s(node: NodeView, demand: Demand) -> float:
    """Return the seconds until a decode node starts a request that is ready to run there.

    This is the current step, stretched by its streams. If the pool is full, it includes the time until enough blocks
    are freed."""
    missing = missing_blocks(node, demand)
    return node.step_s + missing / freed_per_s(node) if missing > 0 else node.step_s


def interference_s(node: NodeView, compute_s: float) -> float:
    """Return the delay that computing the prompt causes, summed over all streams of a decode node, in seconds.

    It counts one more stream than the node has, so that an idle decode node is kept free for the next stream."""
    return (node.streams + 1) * compute_s


def own_s(demand: Demand, node: NodeView, seconds: float) -> float:
    """Return the cost to others, in seconds, of computing a prompt for `seconds` on a decode node."""
    return interference_s(node, seconds) + penalties_s(node, demand)


def penalties_s(node: NodeView, demand: Demand) -> float:
    """Return the cost, in seconds, of expected failures and evictions, which do not delay the request itself."""
    return penalty_s(node, demand) + displaced_s(node, demand)


def first_s(node: NodeView, demand: Demand) -> float:
    """Return the seconds until the node has computed the prompt."""
    return queue_s(node, demand) + compute_s(node, demand)
