"""Placement over several groups of nodes: the cheapest of all of them, and never one that mixes two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.placement.place import NOISE, place, place_among
from kvferry.placement.types import Demand, NodeView, Placement
from kvferry.protocol.errors import ContextLengthExceeded, KvferryError, NoNodes, Overloaded
from kvferry.protocol.lease import Load, Rates
from tests.placement.test_exact import clusters, demands
from tests.placement.test_place import BLOCK, node, where

Side = tuple[Demand, Sequence[NodeView]]


def named(nodes: Sequence[NodeView], fingerprint: str) -> list[NodeView]:
    """Their keys stay, so that constraints concern nodes of each group."""
    return [replace(each, lease=replace(each.lease, fingerprint=fingerprint)) for each in nodes]


def tried(side: Side) -> Placement | KvferryError:
    try:
        return place(*side)
    except (NoNodes, Overloaded, ContextLengthExceeded) as error:
        return error


@settings(max_examples=300)
@given(demands, st.lists(clusters(), min_size=1, max_size=3))
def test_a_pair_is_of_one_group_and_about_as_cheap_as_any(demand: Demand, groups: list[list[NodeView]]) -> None:
    sides = [(demand, named(nodes, f"fp{number}")) for number, nodes in enumerate(groups)]
    found = [tried(side) for side in sides]
    placements = [each for each in found if isinstance(each, Placement)]
    if not placements:
        kinds = {type(each) for each in found}
        with pytest.raises(KvferryError) as refused:
            place_among(sides)
        assert refused.type is next(kind for kind in (Overloaded, ContextLengthExceeded, NoNodes) if kind in kinds)
        return
    chosen = place_among(sides)
    assert len({lease.fingerprint for lease in (chosen.prefill, chosen.decode) if lease}) == 1
    assert chosen in placements
    assert chosen.cost_s <= min(each.cost_s for each in placements) * (1 + NOISE)


def test_one_group_is_placed_as_such() -> None:
    nodes = [node("p1"), node("p2", placed=1), node("d1")]
    assert place_among([(Demand(1000), nodes)]) == place(Demand(1000), nodes)


def test_the_cheapest_group_is_chosen() -> None:
    slow, fast = [node("p1"), node("d1")], [node("p2", rates=Rates(5000.0)), node("d2")]
    assert where(place_among([(Demand(1024), slow), (Demand(1024), fast)])) == ("p2", "d2")
    cached = [node("p1", cached=1008), node("d1")]
    assert where(place_among([(Demand(1024), cached), (Demand(1024), fast)])) == ("p1", "d1")


@pytest.mark.parametrize("turns", [(1, 2), (2, 1)])
def test_of_equal_groups_it_is_the_turn_of_the_node_that_waited_longest(turns: tuple[int, int]) -> None:
    sides = [(Demand(1024), [node(f"d{turn}", placed=turn)]) for turn in turns]
    assert where(place_among(sides)) == (None, "d1")


def test_a_request_that_no_group_takes_is_told_the_most_hopeful_reason() -> None:
    small = [node("d1", load=Load(free_blocks=10, total_blocks=10))]
    larger = [node("d2", load=Load(free_blocks=20, total_blocks=20))]
    full = [node("d3", load=Load(active_blocks=8000, total_blocks=2000))]
    long = Demand(1000)
    with pytest.raises(NoNodes):
        place_among([(long, []), (long, [node("p1")])])
    with pytest.raises(ContextLengthExceeded, match=f"is {20 * BLOCK}$"):
        place_among([(long, small), (long, larger), (long, [])])
    away = replace(long, excluded=frozenset({("d4", 1)}))
    with pytest.raises(NoNodes):
        place_among([(away, small), (away, [node("d4")])])
    with pytest.raises(Overloaded):
        place_among([(long, small), (long, full), (long, [])])
