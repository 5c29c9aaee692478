"""Cost terms of a request on one node, in seconds."""

from __future__ import annotations

from kvferry.placement.blocks import freed_per_s, missing_blocks
from kvferry.placement.cache_value import displaced_s
from kvferry.placement.fetching import fetching
from kvferry.placement.tier_reads import by_itself_s
from kvferry.placement.types import Demand, NodeView

HANDOFF_S = 0.002
"""Grant, commit and acknowledgement of one ship between idle nodes."""


def queue_s(node: NodeView, demand: Demand) -> float:
    """Seconds until the prompt tokens queued ahead of the request on the node are computed."""
    return 0.0 if demand.recovers else node.queue_s


def doubt_s(node: NodeView, demand: Demand) -> float:
    """Return the penalty of a suspected node, in seconds."""
    return demand.doubts.get(node.key, 0.0) if demand.doubts else 0.0


def compute_s(node: NodeView, demand: Demand) -> float:
    """Seconds to compute the tokens the node does not hold, or to read or fetch some of them and compute the rest."""
    if demand.holders and (fetch := fetching(node, demand)):
        return fetch.seconds
    return by_itself_s(node, demand)


def wait_s(node: NodeView, demand: Demand) -> float:
    """Seconds before a decode node starts on a request that is ready to run there: the step under way, stretched by the
    streams beside it, and, when the pool is full, the time until enough blocks come back."""
    missing = missing_blocks(node, demand)
    return node.step_s + missing / freed_per_s(node) if missing > 0 else node.step_s


def harm_s(node: NodeView, compute_s: float) -> float:
    """Seconds that computing the prompt takes from the streams of a decode node, all together.

    One stream is counted that is not there yet: an idle decode node is kept free for the next one."""
    return (node.streams + 1) * compute_s


def own_s(demand: Demand, node: NodeView, seconds: float) -> float:
    """Return the cost to others, in seconds, of computing a prompt for so long on a decode node."""
    return harm_s(node, seconds) + risk_s(node, demand)


def risk_s(node: NodeView, demand: Demand) -> float:
    """Return the cost, in seconds, of expected failures and other effects that the request does not wait for."""
    return doubt_s(node, demand) + displaced_s(node, demand)


def first_s(node: NodeView, demand: Demand) -> float:
    """Return the seconds until the node has computed the prompt."""
    return queue_s(node, demand) + compute_s(node, demand)
