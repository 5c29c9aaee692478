"""Where an attempt goes: the (prefill, decode) pair with the least cost, everything in seconds (DESIGN, Placement).

    remote(P, D) = wait(P) + uncached(P)/rate(P) + exposed_bytes/bandwidth(P→D) + wait(D)
    local(D)     = wait(D) + uncached(D)/rate(D) + harm to the running streams of D

Pure: the same arguments give the same placement. Reuse only ever enters as seconds of computing and shipping saved, so
a node that holds a prefix loses it as soon as its queue costs more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from operator import itemgetter
from typing import Any, TypeVar

from placement.blocks import cached_len, fits, freed_per_s, new_blocks, uncached_len
from placement.costs import HANDOFF_S, compute_s, doubt_s, first_s, own_s, queue_s, risk_s, wait_s
from placement.fetching import holders, with_fetch
from placement.pairs import First, Ready, cheapest_pair, pair_s
from placement.reading import found_len
from placement.refusals import full, no_nodes, too_long
from placement.terms import Demand, NodeView, Placement, unbroken
from placement.worth import spared_s
from protocol.errors import KvferryError
from protocol.layout import blocks_for

NOISE = 0.2
"""Learned rates of equal machines differ by as much: nodes that count alike are equal within this share of a cost."""

Half = TypeVar("Half", bound=tuple[Any, ...])
"""Figures of a node, and the node as the last of them."""


def place(demand: Demand, nodes: Sequence[NodeView]) -> Placement:
    """The cheapest placement; of equal nodes (see NOISE) the one that was not chosen for longest.

    O(n) for n nodes, where few decode nodes hold any of the prompt; see `pairs`. Raises NoNodes without a node that may
    be used, ContextLengthExceeded when the request fits into no pool, Overloaded when every decode node that could hold
    it is beyond its capacity; the first and the last with retry_after.
    """
    out = demand.excluded
    usable = [node for node in nodes if node.lease.state == "ready" and not (out and node.key in out)]
    if found := holders(demand, usable):
        demand = replace(demand, holders=found)
        return with_fetch(demand, _place(demand, usable), usable)
    return _place(demand, usable)


def _place(demand: Demand, usable: Sequence[NodeView]) -> Placement:
    prefills = _prefills(demand, usable)
    if demand.prompt_only and prefills:
        return _alone(demand, prefills)
    decodes = _decodes(demand, usable)
    short = (
        [each for each in decodes if demand.local_tokens >= uncached_len(each[-1], demand)]
        if demand.local_tokens
        else []
    )
    local = _local(demand, short or decodes)
    if short or demand.prompt_only or not prefills:
        return local
    remote = _remote(demand, prefills, decodes)
    return remote if remote and remote.cost_s < local.cost_s else local


def _prefills(demand: Demand, usable: Iterable[NodeView]) -> list[NodeView]:
    if demand.local_only:
        return []
    prefills = [node for node in usable if node.lease.role == "prefill"]
    if demand.pinned:
        prefills = [node for node in prefills if node.key == demand.pinned] or prefills
    return [node for node in prefills if fits(node, demand)]


def _decodes(demand: Demand, usable: Iterable[NodeView]) -> list[Ready]:
    """Those with room, with their wait. Raises what `place` raises."""
    decodes = [node for node in usable if node.lease.role == "decode"]
    if demand.source and demand.broken:
        decodes = [node for node in decodes if unbroken(demand, demand.source, node.key)]
    size = whole = prompt = 0
    roomy: list[Ready] = []
    for node in decodes:
        if node.lease.block_size != size:
            size = node.lease.block_size
            whole, prompt = blocks_for(demand.total_len + 1, size), blocks_for(demand.total_len, size)
        held = cached_len(node, demand) // size if node.cached_len or demand.beside else 0
        if whole <= node.total_blocks and (whole - held <= node.spare_blocks or demand.recovers):
            wait = node.step_s if whole <= node.free_blocks else wait_s(node, demand)
            roomy.append((wait, prompt - held, node))
    if not roomy:
        raise _refusal(demand, decodes)
    return roomy


def _refusal(demand: Demand, decodes: Sequence[NodeView]) -> KvferryError:
    """Why none of them has room."""
    if not decodes:
        return no_nodes(demand.model)
    fitting = [node for node in decodes if fits(node, demand)]
    if not fitting:
        return too_long(demand.total_len + 1, max(node.total_blocks * node.lease.block_size for node in decodes))
    return full(min((new_blocks(node, demand) - node.spare_blocks) / freed_per_s(node) for node in fitting))


def _alone(demand: Demand, prefills: Iterable[NodeView]) -> Placement:
    cost_s, node = _cheapest([(first_s(node, demand) + risk_s(node, demand), node) for node in prefills])
    return Placement(node.lease, None, found_len(node, demand), cost_s, first_s(node, demand))


def _local(demand: Demand, decodes: Iterable[Ready]) -> Placement:
    costs = []
    for wait, _, node in decodes:
        seconds = compute_s(node, demand)
        costs.append((queue_s(node, demand) + wait + seconds + own_s(demand, node, seconds), node))
    cost_s, node = _cheapest(costs)
    others_s = own_s(demand, node, compute_s(node, demand))
    return Placement(None, node.lease, found_len(node, demand), cost_s, cost_s - others_s)


def _remote(demand: Demand, prefills: Sequence[NodeView], decodes: Iterable[Ready]) -> Placement | None:
    """The cheapest pair, or one that equals it half by half; None if all are broken."""
    firsts: list[First] = []
    shortest_s = min([queue_s(node, demand) for node in prefills], default=0.0) if demand.worth else 0.0
    for node in prefills:
        seconds = compute_s(node, demand)
        others_s = risk_s(node, demand) - spared_s(node, demand, shortest_s)
        firsts.append((queue_s(node, demand) + seconds + others_s, seconds, node))
    readies = [(wait + HANDOFF_S + doubt_s(node, demand), blocks, node) for wait, blocks, node in decodes]
    least_s, first, ready = cheapest_pair(demand, firsts, readies)
    if least_s == inf:
        return None
    first = _whose_turn(firsts, first, least_s, lambda other: pair_s(demand, other, ready))
    ready = _whose_turn(readies, ready, least_s, lambda other: pair_s(demand, first, other))
    prefill, cost_s = first[-1], pair_s(demand, first, ready)
    found = found_len(prefill, demand)
    return Placement(prefill.lease, ready[-1].lease, found, cost_s, first_s(prefill, demand))


def _cheapest(costs: Sequence[tuple[float, NodeView]]) -> tuple[float, NodeView]:
    least_s = min(costs, key=itemgetter(0))[0]
    cheapest = min((each for each in costs if each[0] == least_s), key=lambda each: each[1].turn)
    return _whose_turn(costs, cheapest, least_s, itemgetter(0))


def _whose_turn(halves: Iterable[Half], cheapest: Half, least_s: float, cost_s: Callable[[Half], float]) -> Half:
    """The first, in turn order, that equals the cheapest: alike in what is counted, near in what is learned."""
    limit_s, node = least_s * (1 + NOISE), cheapest[-1]
    turn, counted, held, kept = node.turn, node.counted, node.cached_len, node.kept_len
    for half in halves:
        node = half[-1]
        same = node.turn < turn and node.counted == counted and node.cached_len == held and node.kept_len == kept
        if same and cost_s(half) <= limit_s:
            cheapest, turn = half, node.turn
    return cheapest
