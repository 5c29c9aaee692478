"""Fast placement costs, by list operations, for the many nodes of a large cluster that hold nothing of a prompt.

A call per node would take most of a placement's time. Every result equals, to the last bit, that of the per-node
function that its docstring names."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import attrgetter

from kvferry.placement.cache_value import saved_s
from kvferry.placement.costs import wait_s
from kvferry.placement.fetching import MIN_GAIN_S
from kvferry.placement.pairs import ROUNDING, DecodeHalf, PrefillHalf
from kvferry.placement.types import Demand, NodeView, unbroken
from kvferry.protocol.layout import blocks_for

NO_NODE = ("", 0)
"""Key of no node."""


def split_plain(demand: Demand, nodes: Sequence[NodeView]) -> tuple[list[NodeView], list[NodeView]]:
    """Split nodes into plain ones, with equal block size, nothing cached and no constraints, and all others."""
    if not nodes:
        return [], []
    size, named = nodes[0].lease.block_size, set(demand.penalties)
    named.update(key for pair in demand.broken for key in pair if key)
    if demand.beside:
        named.add(demand.beside)
    plain = [node for node in nodes if node.plain_block_size == size]
    if named:
        plain = [node for node in plain if node.key not in named]
    if len(plain) == len(nodes):
        return plain, []
    return plain, [node for node in nodes if node.plain_block_size != size or node.key in named]


def prefill_halves(demand: Demand, plain: Sequence[NodeView], shortest_s: float) -> list[PrefillHalf]:
    """Return the prefill halves of these nodes, equal to those of `place._firsts` for other nodes.

    shortest_s: see `cache_value.spared_s`."""
    seconds, others = computes(demand, plain), displaced(demand, plain)
    if demand.stored_len and demand.worth:
        others = [each - saved_s(node, demand, shortest_s) for each, node in zip(others, plain, strict=True)]
    both = zip(plain, seconds, others, strict=True)
    if demand.recovers:
        return [(compute_s + others_s, compute_s, node) for node, compute_s, others_s in both]
    return [(node.queue_s + compute_s + others_s, compute_s, node) for node, compute_s, others_s in both]


def decode_halves(demand: Demand, plain: Sequence[NodeView]) -> list[DecodeHalf]:
    """Return the decode halves of these nodes with capacity, equal to those of `place._decodes` for other nodes."""
    if not plain:
        return []
    size = plain[0].lease.block_size
    lengths = demand.total_len + 1, demand.total_len
    whole, prompt = (plain[0].lease.blocks_with(blocks_for(length, size)) for length in lengths)
    with_capacity = [node for node in plain if demand.total_len < node.pool_tokens]
    if not demand.recovers:
        with_capacity = [node for node in with_capacity if whole <= node.spare_blocks]
    return [
        (node.step_s if whole <= node.ready_blocks else wait_s(node, demand), prompt, node) for node in with_capacity
    ]


def local_costs(demand: Demand, plain: Sequence[DecodeHalf]) -> list[tuple[float, NodeView]]:
    """Return the costs of local prefill on these nodes, equal to those of `place._local` for other nodes."""
    nodes = [node for _, _, node in plain]
    every = zip(plain, computes(demand, nodes), displaced(demand, nodes), strict=True)
    if demand.recovers:
        return [(wait + s + ((node.streams + 1) * s + others), node) for (wait, _, node), s, others in every]
    return [(node.queue_s + wait + s + ((node.streams + 1) * s + others), node) for (wait, _, node), s, others in every]


def computes(demand: Demand, plain: Sequence[NodeView]) -> list[float]:
    """Return the seconds of `costs.compute_s` for these nodes.

    Without a store, the seconds of each option (compute all, or fetch from one holder) are linear in the seconds per
    token of the node. So an option that is best for the fastest and the slowest node is best for all nodes between
    them, and one that is worse than another for both is never best. With a store they are not linear."""
    total, rates, stored = demand.total_len, [node.rate for node in plain], demand.stored_len
    given = [h for h in demand.holders if h.tokens and unbroken(demand, h.node.key, NO_NODE)]
    own = [total / node.rate - stored * node.gain_s for node in plain] if stored else [total / rate for rate in rates]
    if not given or not rates:
        return own
    slowest, fastest = min(rates), max(rates)
    ends: dict[tuple[float, int], tuple[float, float]] = {}
    for begun_s, rest in [(h.seconds, total - h.tokens) for h in given]:
        ends[begun_s, rest] = (begun_s + rest / slowest, begun_s + rest / fastest)
    lines = [line for line, at in ends.items() if not any(a < at[0] and b < at[1] for a, b in ends.values())]
    if not stored and min([at[0] for at in ends.values()]) >= total / slowest - MIN_GAIN_S:
        return own
    begun_s, rest = lines[0]
    fetched = [begun_s + rest / rate for rate in rates]
    for begun_s, rest in lines[1:]:
        fetched = [f if f < (g := begun_s + rest / rate) else g for f, rate in zip(fetched, rates, strict=True)]
    if not stored and min([at[1] for at in ends.values()]) < total / fastest - MIN_GAIN_S:
        return fetched
    return [f if f < alone_s - MIN_GAIN_S else alone_s for f, alone_s in zip(fetched, own, strict=True)]


def local_bound_s(demand: Demand, plain: Sequence[DecodeHalf]) -> float:
    """Return a quick lower bound of `alone`, in seconds.

    It subtracts MIN_GAIN_S because a slower node may fetch when the fastest one would gain too little by it."""
    if not plain:
        return inf
    nodes = [each[-1] for each in plain]
    fastest_nodes = nodes if demand.stored_len else [max(nodes, key=attrgetter("rate"))]
    seconds = min(computes(demand, fastest_nodes)) - (MIN_GAIN_S if demand.holders else 0.0)
    return (min([wait for wait, _, _ in plain]) + 2 * seconds) / ROUNDING


def displaced(demand: Demand, plain: Sequence[NodeView]) -> list[float]:
    """Return the seconds of `cache_value.displaced_s` for these nodes."""
    if not demand.worth or not plain:
        return [0.0] * len(plain)
    size, worth = plain[0].lease.block_size, demand.worth
    fresh = plain[0].lease.blocks_with(blocks_for(demand.total_len, size))
    return [
        0.0
        if fresh <= node.unclaimed_blocks
        else worth * (min(fresh - node.unclaimed_blocks, node.lease.load.cached_blocks) * size) / node.rate
        for node in plain
    ]
