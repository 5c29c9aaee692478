"""Main placement function: chooses the (prefill, decode) pair, or the single node, with the least cost in seconds.

    remote(P, D) = wait(P) + uncached(P)/rate(P) + exposed_bytes/bandwidth(P→D) + wait(D)
    local(D)     = wait(D) + uncached(D)/rate(D) + delay of the running streams of D

Pure: the same arguments give the same placement. Cache reuse counts only as seconds of computing and shipping saved, so
a node with a cached prefix is not chosen once its queue costs more than that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from kvferry.placement.blocks import fits, freed_per_s, has_capacity, new_blocks, shipped_blocks, uncached_len
from kvferry.placement.cache_value import saved_s
from kvferry.placement.costs import HANDOFF_S, compute_s, first_s, own_s, penalties_s, penalty_s, queue_s, wait_s
from kvferry.placement.fetching import holders, with_fetch
from kvferry.placement.pairs import DecodeHalf, PrefillHalf, cheapest_pair, pair_s
from kvferry.placement.rejections import full, no_nodes, too_long
from kvferry.placement.stream_targets import idle_prefills, within_target
from kvferry.placement.tier_reads import reused_len
from kvferry.placement.types import Demand, NodeView, Placement, unbroken
from kvferry.placement.uncached_nodes import decode_halves, local_bound_s, local_costs, prefill_halves, split_plain
from kvferry.protocol.errors import ContextLengthExceeded, KvferryError, NoNodes, Overloaded

NOISE = 0.2
"""Relative noise of learned rates: otherwise equal nodes whose costs differ by no more count as equal."""


class Decodes(NamedTuple):
    """Decode nodes with capacity, and their wait.

    plain: nodes that hold nothing of the prompt (see `uncached_nodes.apart`)."""

    plain: list[DecodeHalf]
    others: list[DecodeHalf]


Half = TypeVar("Half", bound=tuple[Any, ...])
"""Costs of one half of a pair, with the node as the last element."""


def place(demand: Demand, nodes: Sequence[NodeView]) -> Placement:
    """Return the cheapest placement; of equal nodes (see NOISE) the least recently chosen one.

    O(n) for n nodes if few decode nodes hold any of the prompt; see `pairs` and `uncached_nodes`. Raises NoNodes
    without a usable node, ContextLengthExceeded if the request fits into no pool, and Overloaded if every decode node
    that could hold it is beyond its capacity. NoNodes and Overloaded have retry_after."""
    usable = [node for node in nodes if node.key not in demand.excluded] if demand.excluded else nodes
    if found := holders(demand, usable):
        demand = replace(demand, holders=found)
        return with_fetch(demand, _place(demand, usable), usable)
    return _place(demand, usable)


def place_among(groups: Sequence[tuple[Demand, Sequence[NodeView]]]) -> Placement:
    """Return the cheapest placement over groups of nodes, each with its demand, so that no pair mixes two groups.

    Of equal nodes (see NOISE) it is the least recently chosen one, as within a group. With one group the result is that
    of `place`. Raises what `place` raises: Overloaded if a group could take the request later, ContextLengthExceeded if
    it fits into no group."""
    if len(groups) == 1:
        return place(*groups[0])
    found: list[tuple[float, Placement, NodeView]] = []
    refusals: list[KvferryError] = []
    for demand, nodes in groups:
        try:
            placement = place(demand, nodes)
        except (NoNodes, Overloaded, ContextLengthExceeded) as error:
            refusals.append(error)
        else:
            lease = placement.prefill or placement.decode
            found.append((placement.cost_s, placement, next(node for node in nodes if node.lease is lease)))
    if not found:
        raise _soonest_error(refusals, groups)
    least = min(found, key=itemgetter(0))
    return _least_recent(found, least, least[0], itemgetter(0))[1]


def _soonest_error(
    refusals: Sequence[KvferryError], groups: Sequence[tuple[Demand, Sequence[NodeView]]]
) -> KvferryError:
    """Return the error for a request that all groups refuse.

    The request is not too long if it fits into the pool of a temporarily excluded node."""
    if full := [error for error in refusals if isinstance(error, Overloaded)]:
        return min(full, key=lambda error: error.retry_after or 0.0)
    demand, _ = groups[0]
    largest = max((node.pool_tokens for _, nodes in groups for node in nodes if node.role == "decode"), default=0)
    return too_long(demand.total_len + 1, largest) if 0 < largest <= demand.total_len else no_nodes(demand.model)


def _place(demand: Demand, usable: Sequence[NodeView]) -> Placement:
    prefills = _prefills(demand, usable)
    if demand.prompt_only and prefills:
        return _prefill_only(demand, prefills)
    decodes = _decodes(demand, usable)
    short = _local_candidates(demand, decodes)
    remote = None if any(short) or demand.prompt_only or not prefills else _remote(demand, prefills, decodes)
    local = _local(demand, short if any(short) else decodes, remote.cost_s if remote else inf)
    if local and (not remote or local.cost_s <= remote.cost_s):
        return local
    assert remote
    return remote


def _prefills(demand: Demand, usable: Iterable[NodeView]) -> list[NodeView]:
    if demand.local_only:
        return []
    prefills = [node for node in usable if node.role == "prefill"]
    if demand.pinned:
        prefills = [node for node in prefills if node.key == demand.pinned] or prefills
    fitting = [node for node in prefills if demand.total_len < node.pool_tokens]
    return idle_prefills(fitting) if demand.background else fitting


def _decodes(demand: Demand, usable: Iterable[NodeView]) -> Decodes:
    """Return the decode nodes with capacity, and their wait. Raises what `place` raises."""
    decodes = [node for node in usable if node.role == "decode"]
    if demand.source and demand.broken:
        decodes = [node for node in decodes if unbroken(demand, demand.source, node.key)]
    plain, others = split_plain(demand, decodes)
    with_capacity = Decodes(
        decode_halves(demand, plain),
        [(wait_s(node, demand), shipped_blocks(node, demand), node) for node in others if has_capacity(node, demand)],
    )
    if not any(with_capacity):
        raise _refusal(demand, decodes)
    return Decodes(*within_target(demand, with_capacity)) if demand.itl_s < inf or demand.background else with_capacity


def _local_candidates(demand: Demand, decodes: Decodes) -> Decodes:
    """Return the decode nodes that have at most `local_tokens` to compute."""
    most = demand.local_tokens
    plain = decodes.plain if most >= demand.total_len else []
    return Decodes(plain, [each for each in decodes.others if most >= uncached_len(each[-1], demand)] if most else [])


def _refusal(demand: Demand, decodes: Sequence[NodeView]) -> KvferryError:
    """Return the error that states why no decode node takes the request."""
    if not decodes:
        return no_nodes(demand.model)
    fitting = [node for node in decodes if fits(node, demand)]
    if not fitting:
        return too_long(demand.total_len + 1, max(node.pool_tokens for node in decodes))
    return full(min((new_blocks(node, demand) - node.spare_blocks) / freed_per_s(node) for node in fitting))


def _prefill_only(demand: Demand, prefills: Sequence[NodeView]) -> Placement:
    cost_s, node = _cheapest([(cost_s, node) for cost_s, _, node in _prefill_halves(demand, prefills)])
    first_token_s, waits_s = first_s(node, demand), queue_s(node, demand)
    return Placement(node.lease, None, reused_len(node, demand), cost_s, first_token_s, queue_s=waits_s)


def _local(demand: Demand, decodes: Decodes, limit_s: float) -> Placement | None:
    """Return the cheapest placement on one decode node.

    None if a quick bound shows that all cost more than `limit_s`."""
    costs = []
    for wait, _, node in decodes.others:
        seconds = compute_s(node, demand)
        costs.append((queue_s(node, demand) + wait + seconds + own_s(demand, node, seconds), node))
    if limit_s < min([local_bound_s(demand, decodes.plain), *(cost_s for cost_s, _ in costs)]):
        return None
    costs += local_costs(demand, decodes.plain)
    cost_s, node = _cheapest(costs)
    others_s = own_s(demand, node, compute_s(node, demand))
    waits_s, found = queue_s(node, demand), reused_len(node, demand)
    return Placement(None, node.lease, found, cost_s, cost_s - others_s, queue_s=waits_s)


def _prefill_halves(demand: Demand, prefills: Sequence[NodeView], shortest_s: float = 0.0) -> list[PrefillHalf]:
    """Return the prefill halves of pairs. shortest_s: shortest queue of the nodes, for `spared_s`."""
    plain, others = split_plain(demand, prefills)
    found = prefill_halves(demand, plain, shortest_s)
    for node in others:
        seconds = compute_s(node, demand)
        others_s = penalties_s(node, demand) - saved_s(node, demand, shortest_s)
        found.append((queue_s(node, demand) + seconds + others_s, seconds, node))
    return found


def _remote(demand: Demand, prefills: Sequence[NodeView], decodes: Decodes) -> Placement | None:
    """Return the cheapest pair, or one with two equal halves; None if all pairs are broken."""
    shortest_s = min([queue_s(node, demand) for node in prefills]) if demand.worth else 0.0
    prefill_side = _prefill_halves(demand, prefills, shortest_s)
    decode_side = [(wait + HANDOFF_S, blocks, node) for wait, blocks, node in decodes.plain]
    decode_side += [(wait + HANDOFF_S + penalty_s(node, demand), blocks, node) for wait, blocks, node in decodes.others]
    least_s, first, ready = cheapest_pair(demand, prefill_side, decode_side)
    if least_s == inf:
        return None
    first = _least_recent(prefill_side, first, least_s, lambda other: pair_s(demand, other, ready))
    ready = _least_recent(decode_side, ready, least_s, lambda other: pair_s(demand, first, other))
    prefill, cost_s = first[-1], pair_s(demand, first, ready)
    found, first_token_s = reused_len(prefill, demand), first_s(prefill, demand)
    waits_s = queue_s(prefill, demand)
    return Placement(prefill.lease, ready[-1].lease, found, cost_s, first_token_s, queue_s=waits_s)


def _cheapest(costs: Sequence[tuple[float, NodeView]]) -> tuple[float, NodeView]:
    least_s = min(costs, key=itemgetter(0))[0]
    cheapest = min((each for each in costs if each[0] == least_s), key=lambda each: each[1].turn)
    return _least_recent(costs, cheapest, least_s, itemgetter(0))


def _least_recent(halves: Iterable[Half], cheapest: Half, least_s: float, cost_s: Callable[[Half], float]) -> Half:
    """Return the first node in turn order that equals the cheapest: same counts, and a cost within NOISE."""
    limit_s, node = least_s * (1 + NOISE), cheapest[-1]
    turn, counted, held, kept = node.turn, node.counted, node.cached_len, _tokens(node)
    for half in [half for half in halves if half[-1].turn < turn and half[-1].counted == counted]:
        node = half[-1]
        same = node.turn < turn and node.cached_len == held and _tokens(node) == kept
        if same and cost_s(half) <= limit_s:
            cheapest, turn = half, node.turn
    return cheapest


def _tokens(node: NodeView) -> tuple[int, ...]:
    """Return the tokens that the node would read from each of its tiers."""
    return tuple(tokens for tokens, _ in node.kept) if node.kept else ()
