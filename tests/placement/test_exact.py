"""The choice is that of a search which tries every node and every pair, and figures made by lists are those of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.placement import uncached_nodes
from kvferry.placement.blocks import fits, has_capacity, shipped_blocks, uncached_len
from kvferry.placement.cache_value import displaced_s, saved_s
from kvferry.placement.costs import HANDOFF_S, compute_s, own_s, penalties_s, penalty_s, queue_s, wait_s
from kvferry.placement.fetching import holders
from kvferry.placement.pairs import pair_s
from kvferry.placement.place import NOISE, place
from kvferry.placement.types import Demand, NodeView, TierPrefix
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.lease import Load, Rates
from tests.placement.test_place import node

Chosen = tuple[str | None, str | None, float]
KEYS = [(f"{role}{number}", 1) for role in "pd" for number in range(6)]
"""p5 and d5 are in no cluster."""


rates = st.sampled_from([1000.0, 1100.0, 4000.0])
ships = st.sampled_from([1e7, 1e9])
stores = st.sampled_from([0.0, 1e-4, 0.005, 0.1])


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeView]:
    """Few values, so that many nodes are equal, or nearly."""
    some = draw(st.sampled_from([0, 1, 3]))
    nodes = []
    for role in "pd":
        for number in range(draw(st.integers(0 if role == "p" else 1, 5))):
            busy, cached = draw(st.integers(0, some)), draw(st.sampled_from([0, 400, 990]))
            view = node(
                f"{role}{number}",
                cached=draw(st.sampled_from([0, 0, 0, 16, 500, 992])),
                waiting=300 * busy,
                streams=busy,
                pending=150 * (busy // 3),
                placed=draw(st.integers(0, 5)),
                rates=Rates(draw(rates), 0.02, draw(ships), store_block_s=draw(stores)),
                load=Load(free_blocks=1000 - cached, cached_blocks=cached, total_blocks=1000),
            )  # fmt: skip
            nodes.append(replace(view, kept=draw(st.sampled_from([(), (), (), (TierPrefix(800, 1e-4),)]))))
    return nodes


keys = st.sampled_from(KEYS)
demands = st.builds(
    Demand,
    st.sampled_from([64, 1000, 1024, 1999]),
    prompt_only=st.sampled_from([False, False, True]),
    local_tokens=st.sampled_from([0, 0, 30]),
    broken=st.sets(st.tuples(st.none() | keys, keys), max_size=3).map(frozenset),
    penalties=st.dictionaries(keys, st.sampled_from([0.01, 0.5]), max_size=2),
    recovers=st.booleans(),
    beside=st.none() | keys,
    fetches=st.booleans(),
    worth=st.sampled_from([0.0, 0.5]),
    stored_len=st.sampled_from([0, 0, 48, 512, 992]),
).map(lambda demand: replace(demand, stored_len=min(demand.stored_len, (demand.total_len - 1) // 16 * 16)))


def searched(demand: Demand, nodes: Sequence[NodeView]) -> Chosen:
    """Who is chosen, and at what cost."""
    demand = replace(demand, holders=holders(demand, nodes))
    prefills = [view for view in nodes if view.lease.role == "prefill" and fits(view, demand)]
    decodes = [view for view in nodes if view.lease.role == "decode" and has_capacity(view, demand)]
    least_s = min((queue_s(view, demand) for view in prefills), default=0.0)

    def alone_s(view: NodeView) -> float:
        seconds = compute_s(view, demand)
        return queue_s(view, demand) + wait_s(view, demand) + seconds + own_s(demand, view, seconds)

    def first_s(view: NodeView) -> float:
        spared = 0.0 if demand.prompt_only else saved_s(view, demand, least_s)
        return queue_s(view, demand) + compute_s(view, demand) + (penalties_s(view, demand) - spared)

    def ready_s(view: NodeView) -> float:
        return wait_s(view, demand) + HANDOFF_S + penalty_s(view, demand)

    def both_s(prefill: NodeView, decode: NodeView) -> float:
        first = (first_s(prefill), compute_s(prefill, demand), prefill)
        return pair_s(demand, first, (ready_s(decode), shipped_blocks(decode, demand), decode))

    if demand.prompt_only and prefills:
        one, cost_s = cheapest(prefills, first_s)
        return one.lease.node_id, None, cost_s
    short = [view for view in decodes if demand.local_tokens and uncached_len(view, demand) <= demand.local_tokens]
    local, local_cost_s = cheapest(short or decodes, alone_s)
    pairs = [(p, d) for p in prefills for d in decodes] if not (short or demand.prompt_only) else []
    cost_s, pair = inf, None
    pairs.sort(key=lambda pair: (first_s(pair[0]), pair[0].turn))
    pairs.sort(key=lambda pair: (ready_s(pair[1]), shipped_blocks(pair[1], demand), pair[1].turn))
    for p, d in pairs:
        if both_s(p, d) < cost_s:
            cost_s, pair = both_s(p, d), (p, d)
    if pair:
        p, d = pair
        p = first_in_turn(prefills, p, cost_s, lambda view: both_s(view, d))
        d = first_in_turn(decodes, d, cost_s, lambda view: both_s(p, view))
        if both_s(p, d) < local_cost_s:
            return p.lease.node_id, d.lease.node_id, both_s(p, d)
    return None, local.lease.node_id, local_cost_s


def cheapest(nodes: Sequence[NodeView], cost_s: Callable[[NodeView], float]) -> tuple[NodeView, float]:
    best = min(nodes, key=lambda view: (cost_s(view), view.turn))
    best = first_in_turn(nodes, best, cost_s(best), cost_s)
    return best, cost_s(best)


def first_in_turn(
    nodes: Sequence[NodeView], best: NodeView, least_s: float, cost_s: Callable[[NodeView], float]
) -> NodeView:
    def alike(view: NodeView) -> bool:
        same = (view.counted, view.cached_len, view.kept) == (best.counted, best.cached_len, best.kept)
        return same and cost_s(view) <= least_s * (1 + NOISE)

    return min([best, *filter(alike, nodes)], key=lambda view: view.turn)


@settings(max_examples=200, deadline=None)
@given(demands, clusters())
def test_the_choice_is_that_of_a_search_through_all(demand: Demand, nodes: list[NodeView]) -> None:
    try:
        placement = place(demand, nodes)
    except KvferryError:
        assert not any(view.lease.role == "decode" and has_capacity(view, demand) for view in nodes)
        return
    names = [lease.node_id if lease else None for lease in (placement.prefill, placement.decode)]
    assert (*names, placement.cost_s) == searched(demand, nodes)


@settings(deadline=None)
@given(demands, clusters())
def test_figures_made_by_lists_are_those_of_each_node(demand: Demand, nodes: list[NodeView]) -> None:
    demand = replace(demand, holders=holders(demand, nodes))
    bare, others = uncached_nodes.split_plain(demand, nodes)
    assert sorted([*bare, *others], key=lambda view: view.key) == sorted(nodes, key=lambda view: view.key)
    assert uncached_nodes.computes(demand, bare) == [compute_s(view, demand) for view in bare]
    assert uncached_nodes.displaced(demand, bare) == [displaced_s(view, demand) for view in bare]
    readies = uncached_nodes.decode_halves(demand, bare)
    assert readies == [
        (wait_s(view, demand), shipped_blocks(view, demand), view) for view in bare if has_capacity(view, demand)
    ]
    assert all(
        cost_s >= uncached_nodes.local_bound_s(demand, readies)
        for cost_s, _ in uncached_nodes.local_costs(demand, readies)
    )


@given(st.integers(2, 12), st.integers(0, 3), st.data())
def test_idle_equal_nodes_take_turns(count: int, holding: int, data: st.DataObject) -> None:
    """Each is chosen once before any is chosen again, anyone who went first, also of those that hold the same."""
    held = data.draw(st.sampled_from([0, 512]))
    turns = data.draw(st.permutations(range(count)))
    views = [node(f"p{i}", cached=held if i < holding else 0, placed=turn) for i, turn in enumerate(turns)]
    alike = [view for view in views if view.cached_len] or views
    decode, chosen = node("d0", streams=50), []
    for turn in range(count, count + len(alike)):
        found = place(Demand(1024), [*views, decode]).prefill
        assert found is not None
        chosen.append(found.node_id)
        views = [replace(view, placed=turn) if view.lease is found else view for view in views]
    assert chosen == [view.lease.node_id for view in sorted(alike, key=lambda view: view.turn)]


@pytest.mark.parametrize("recovers", [False, True])
def test_no_nodes_are_no_figures(recovers: bool) -> None:
    demand = Demand(100, recovers=recovers)
    assert uncached_nodes.split_plain(demand, []) == ([], [])
    assert (
        uncached_nodes.prefill_halves(demand, [], 0.0)
        == uncached_nodes.decode_halves(demand, [])
        == uncached_nodes.local_costs(demand, [])
        == []
    )
    assert uncached_nodes.local_bound_s(demand, []) == inf
