"""Who fetches what from whom, in seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.placement.costs import compute_s
from kvferry.placement.fetching import CANDIDATES, HANDSHAKE_S, MIN_GAIN_S, fetch_s, fetching, holders
from kvferry.placement.place import place
from kvferry.placement.types import Demand, NodeView
from kvferry.protocol.lease import Rates
from kvferry.protocol.messages import Holder
from tests.placement.test_place import node, where

LONG = Demand(1024, fetches=True)


def with_holders(*nodes: NodeView, demand: Demand = LONG) -> Demand:
    return replace(demand, holders=holders(demand, nodes))


def test_a_prefix_elsewhere_is_fetched_where_computing_takes_longer() -> None:
    asks, holds = node("p1"), node("p2", cached=512)
    fetch = fetching(asks, with_holders(asks, holds))
    assert fetch is not None
    assert (fetch.holder, fetch.cached_len) == (holds, 512)
    assert fetch.seconds == pytest.approx(fetch_s(holds, 512) + 0.512)
    assert compute_s(asks, with_holders(asks, holds)) == fetch.seconds < compute_s(asks, LONG)


@pytest.mark.parametrize(
    ("asks", "holds", "why"),
    [
        (node("p1"), node("p2"), "it holds nothing"),
        (node("p1", cached=512), node("p2", cached=512), "nor more than who asks"),
        (node("p1"), node("p2", cached=512, rates=Rates(1000.0, 0.02, 1e7)), "a slow link"),
        (node("p1", rates=Rates(1e6)), node("p2", cached=512), "a fast node"),
        (node("p1"), node("p2", cached=16, waiting=1000), "a busy holder, for a block"),
    ],
)
def test_nothing_is_fetched_where_nothing_is_gained(asks: NodeView, holds: NodeView, why: str) -> None:
    assert fetching(asks, with_holders(asks, holds)) is None, why


def test_engines_of_others_neither_fetch_nor_give_prefixes() -> None:
    asks, holds = (replace(each, lease=replace(each.lease, engine="vllm 0.32.0"))
                   for each in (node("p1"), node("p2", cached=512)))  # fmt: skip
    assert holders(LONG, (asks, holds)) == ()
    assert fetching(asks, with_holders(asks, holds)) is None


def test_a_gain_below_the_threshold_is_none() -> None:
    asks = node("p1", rates=Rates(16 / (HANDSHAKE_S + MIN_GAIN_S), 0.02, 1e12))
    holds = node("p2", cached=16, rates=Rates(1000.0, 0.02, 1e18))
    assert fetching(asks, with_holders(asks, holds)) is None
    slower = replace(asks, lease=replace(asks.lease, rates=Rates(asks.lease.rates.prefill_tokens_per_s * 0.9)))
    assert fetching(slower, with_holders(slower, holds)) is not None


def test_the_block_of_the_last_token_is_computed() -> None:
    asks, holds = node("p1"), node("p2", cached=1024)
    fetch = fetching(asks, with_holders(asks, holds))
    assert fetch is not None
    assert fetch.cached_len == 1008


def test_the_better_of_two_holders_gives() -> None:
    asks, far = node("p1"), node("p2", cached=1008, rates=Rates(1000.0, 0.02, 3e7))
    near = node("p3", cached=800)
    fetch = fetching(asks, with_holders(asks, far, near))
    assert fetch is not None
    assert fetch.holder is near
    both = replace(far, lease=near.lease, cached_len=1008)
    fetch = fetching(asks, with_holders(asks, both, near))
    assert fetch is not None
    assert fetch.holder is both


def test_no_more_holders_are_looked_at_than_matter() -> None:
    nodes = [node(f"p{i}", cached=512, waiting=i) for i in range(50)]
    assert [each.node.lease.node_id for each in holders(LONG, nodes)] == [f"p{i}" for i in range(CANDIDATES)]


@pytest.mark.parametrize(
    "demand",
    [
        Demand(1024),
        Demand(1024, fetches=True, source=("d9", 1)),
        Demand(1024, fetches=True, broken=frozenset({(("p2", 1), ("p1", 1))})),
        Demand(1024, fetches=True, broken=frozenset({(("p2", 1), None)})),
    ],
)
def test_not_where_it_is_switched_off_nor_by_a_stream_that_moves_nor_over_a_broken_pair(demand: Demand) -> None:
    asks, holds = node("p1"), node("p2", cached=512)
    assert fetching(asks, with_holders(asks, holds, demand=demand)) is None


def test_a_busy_holder_gives_to_an_idle_node_and_the_placement_says_so() -> None:
    nodes = [node("p1"), node("p2", cached=960, waiting=5000), node("d1")]
    placement = place(LONG, nodes)
    assert where(placement) == ("p1", "d1")
    assert placement.cached_len == 960
    assert placement.holder == Holder(nodes[1].lease.target, 60)
    assert place(Demand(1024), nodes).holder is None


def test_an_idle_holder_computes_itself() -> None:
    placement = place(LONG, [node("p1"), node("p2", cached=960), node("d1")])
    assert where(placement) == ("p2", "d1")
    assert placement.holder is None


def test_what_decode_holds_is_fetched_by_prefill() -> None:
    """Where decode is too busy to compute the rest itself."""
    placement = place(LONG, [node("p1"), node("d1", cached=512, streams=30)])
    assert where(placement) == ("p1", "d1")
    assert placement.holder is not None
    assert placement.holder.node.node_id == "d1"


def test_what_is_excluded_or_drains_gives_nothing() -> None:
    nodes = [node("p1"), node("p2", cached=960), node("d1")]
    assert place(replace(LONG, excluded=frozenset({("p2", 1)})), nodes).holder is None
    assert place(LONG, [nodes[0], node("p2", cached=960, state="draining"), nodes[2]]).holder is None


views = st.builds(
    node,
    st.sampled_from(["p1", "p2", "p3", "d1", "d2"]),
    cached=st.integers(0, 1100),
    waiting=st.integers(0, 3000),
    streams=st.integers(0, 20),
    rates=st.builds(Rates, st.floats(10, 1e5), st.floats(0.001, 0.1), st.floats(1e6, 1e10)),
)


@given(st.lists(views, min_size=1, max_size=5, unique_by=lambda n: n.lease.node_id), st.integers(1, 1100))
def test_a_fetch_is_never_slower_than_computing(nodes: list[NodeView], length: int) -> None:
    demand = with_holders(*nodes, demand=replace(LONG, total_len=length))
    for view in nodes:
        fetch = fetching(view, demand)
        if fetch is None:
            continue
        assert fetch.seconds <= compute_s(view, replace(demand, holders=())) - MIN_GAIN_S
        assert view.cached_len < fetch.cached_len < length
        assert fetch.cached_len <= fetch.holder.cached_len
        assert fetch.holder is not view
