"""Placement as a pure function: tables, and properties over random clusters."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.placement.blocks import fits, shipped_blocks
from kvferry.placement.cache_value import displaced_s, saved_s
from kvferry.placement.costs import HANDOFF_S, compute_s, interference_s, queue_s, wait_s
from kvferry.placement.pairs import CHUNK_TOKENS, exposed_s
from kvferry.placement.place import NOISE, place
from kvferry.placement.types import Demand, NodeView, Placement
from kvferry.protocol.errors import ContextLengthExceeded, KvferryError, NoNodes, Overloaded
from kvferry.protocol.lease import Load, NodeLease, Rates

BLOCK, BLOCK_BYTES = 16, 368_640


def node(
    node_id: str,
    *,
    cached: int = 0,
    waiting: int = 0,
    streams: int = 0,
    pending: int = 0,
    placed: int = 0,
    **lease: Any,
) -> NodeView:
    role = "prefill" if node_id.startswith("p") else "decode"
    load = lease.pop("load", Load(free_blocks=1000, total_blocks=1000))
    rates = lease.pop("rates", Rates(1000.0, 0.02, 1e9))
    fields = NodeLease(
        node_id, role, 1, "ready", "", "", "fp", "m", 8192, BLOCK, BLOCK_BYTES, load, rates
    )  # fmt: skip
    return NodeView(replace(fields, **lease), cached, waiting, streams, pending, placed)


def where(placement: Placement) -> tuple[str | None, str | None]:
    ids = [lease.node_id if lease else None for lease in (placement.prefill, placement.decode)]
    return ids[0], ids[1]


LONG = Demand(1024)
CASES = {
    "long prompts go to prefill": (LONG, [node("p1"), node("d1")], ("p1", "d1")),
    "no prefill node": (LONG, [node("d1")], (None, "d1")),
    "short uncached rest on an idle decode": (LONG, [node("p1"), node("d1", cached=1020)], (None, "d1")),
    "the same on a busy decode goes to prefill": (
        LONG, [node("p1", cached=1008), node("d1", cached=1008, streams=12)], ("p1", "d1")),
    "the prefix wins": (LONG, [node("p1"), node("p2", cached=512), node("d1")], ("p2", "d1")),
    "the prefix loses to a queue that costs more": (
        LONG, [node("p1"), node("p2", cached=512, waiting=600), node("d1")], ("p1", "d1")),
    "the prefix wins against a queue that costs less": (
        LONG, [node("p1"), node("p2", cached=512, waiting=400), node("d1")], ("p2", "d1")),
    "blocks that decode holds need no shipping": (
        LONG,
        [node("p1", rates=Rates(1e6, 0.02, 1e8)), node("d1"), node("d2", cached=512, streams=1)],
        ("p1", "d2"),
    ),
    "fewer streams": (LONG, [node("p1"), node("d1", streams=3), node("d2", streams=2)], ("p1", "d2")),
    "faster prefill": (LONG, [node("p1"), node("p2", rates=Rates(2000.0)), node("d1")], ("p2", "d1")),
    "a long prefill queue makes decode compute": (
        LONG, [node("p1", waiting=9000), node("d1", streams=1)], (None, "d1")),
    "draining prefill": (LONG, [node("p1", state="draining"), node("p2", waiting=500), node("d1")], ("p2", "d1")),
    "draining decode": (LONG, [node("p1"), node("d1", state="draining"), node("d2", streams=9)], ("p1", "d2")),
    "excluded nodes": (
        Demand(1024, excluded=frozenset({("p1", 1), ("d1", 1)})),
        [node("p1"), node("p2", waiting=500), node("d1"), node("d2")],
        ("p2", "d2"),
    ),
    "a broken pair, whose nodes do work with others": (
        Demand(1024, broken=frozenset({(("p1", 1), ("d1", 1))})), [node("p1"), node("d1"), node("d2", streams=9)],
        ("p1", "d2")),
    "a broken pair and nobody else": (
        Demand(1024, broken=frozenset({(("p1", 1), ("d1", 1))})), [node("p1"), node("d1", streams=9)], (None, "d1")),
    "a decode node that no prefill node reaches": (
        Demand(1024, broken=frozenset({(None, ("d1", 1))})),
        [node("p1"), node("p2"), node("d1"), node("d2", streams=9)], ("p1", "d2")),
    "a prefill node that reaches nobody": (
        Demand(1024, broken=frozenset({(("p1", 1), None)})), [node("p1"), node("p2", waiting=500), node("d1")],
        ("p2", "d1")),
    "a prefill node that reaches nobody ends what ends there": (
        Demand(1024, prompt_only=True, broken=frozenset({(("p1", 1), None)})), [node("p1"), node("d1")],
        ("p1", None)),
    "doubts are seconds": (
        Demand(1024, penalties={("p1", 1): 0.6, ("d1", 1): 0.6}),
        [node("p1"), node("p2", waiting=500), node("d1"), node("d2", streams=9)], ("p2", "d2")),
    "doubts that cost less than a queue": (
        Demand(1024, penalties={("p1", 1): 0.4}), [node("p1"), node("p2", waiting=500), node("d1")], ("p1", "d1")),
    "what recovers goes where its prefix is, whatever waits there": (
        Demand(1024, recovers=True), [node("p1", cached=1008, waiting=9000), node("p2"), node("d1", streams=9)],
        ("p1", "d1")),
    "what recovers is never sent away": (
        Demand(1024, recovers=True),
        [node("p1"), node("d1", load=Load(active_blocks=1000, total_blocks=1000), pending=9000)], ("p1", "d1")),
    "an excluded epoch is not the node that came back": (
        Demand(1024, excluded=frozenset({("d1", 1)})), [node("p1"), node("d1", epoch=2)], ("p1", "d1")),
    "pinned": (Demand(1024, pinned=("p2", 1)), [node("p1"), node("p2", waiting=900), node("d1")], ("p2", "d1")),
    "pinned but gone": (Demand(1024, pinned=("p9", 1)), [node("p1"), node("d1")], ("p1", "d1")),
    "local only": (Demand(1024, local_only=True), [node("p1"), node("d1", streams=9)], (None, "d1")),
    "one token needs no decode": (Demand(1024, prompt_only=True), [node("p1"), node("d1")], ("p1", None)),
    "one token without prefill": (Demand(1024, prompt_only=True), [node("d1")], (None, "d1")),
    "short by setting": (Demand(1024, local_tokens=1024), [node("p1"), node("d1", streams=9)], (None, "d1")),
    "not short by setting": (Demand(1025, local_tokens=1024), [node("p1"), node("d1", streams=9)], ("p1", "d1")),
    "room before a full pool": (
        LONG,
        [
            node("p1"),
            node("d1", load=Load(active_blocks=990, free_blocks=10, total_blocks=1000)),
            node("d2", streams=20),
        ],
        ("p1", "d2"),
    ),
    "cached blocks are room": (
        LONG, [node("p1"), node("d1", load=Load(cached_blocks=1000, total_blocks=1000)), node("d2", streams=20)],
        ("p1", "d1")),
    "a prefill node too small for the prompt": (
        LONG, [node("p1", load=Load(free_blocks=8, total_blocks=8)), node("d1", streams=5)], (None, "d1")),
}  # fmt: skip


@pytest.mark.parametrize(("demand", "nodes", "expected"), CASES.values(), ids=CASES.keys())
def test_choice(demand: Demand, nodes: list[NodeView], expected: tuple[str | None, str | None]) -> None:
    assert where(place(demand, nodes)) == expected
    assert where(place(demand, nodes[::-1])) == expected


def test_costs_are_those_of_the_formula() -> None:
    p, d = node("p1", cached=512, waiting=100), node("d1", streams=2)
    placement = place(LONG, [p, d])
    blocks = 1024 // BLOCK
    exposed = max(blocks * BLOCK_BYTES / 1e9 - 0.512, 16 * BLOCK_BYTES / 1e9)
    assert placement.cost_s == pytest.approx(0.1 + 0.512 + exposed + 0.02 * 1.1 + HANDOFF_S)
    assert placement.first_token_s == pytest.approx(0.612)
    assert placement.cached_len == 512


def test_a_doubt_is_no_part_of_what_is_expected() -> None:
    doubted = Demand(1024, penalties={("d1", 1): 5.0})
    for nodes in ([node("p1"), node("d1")], [node("d1")]):
        assert place(doubted, nodes).first_token_s == pytest.approx(place(LONG, nodes).first_token_s)
        assert place(doubted, nodes).cost_s > place(LONG, nodes).cost_s + 4.9


def test_a_whole_prompt_is_never_cached() -> None:
    assert place(LONG, [node("d1", cached=1024)]).cached_len == 1008


def test_of_equal_nodes_the_one_that_was_not_chosen_for_longest() -> None:
    nodes = [node("p0", placed=9), node("p1", placed=7), node("d0", placed=8), node("d1", placed=3), node("d2")]
    assert where(place(LONG, nodes)) == ("p1", "d2")
    assert where(place(Demand(1024, prompt_only=True), nodes)) == ("p1", None)
    assert where(place(Demand(1024, local_only=True), nodes)) == (None, "d2")


def test_rates_that_were_learned_a_little_apart_are_equal_and_what_is_counted_is_not() -> None:
    """Warm-ups of equal machines never tell quite the same: one pair had had every request of an idle cluster."""
    fast, slow = Rates(1000.0, 0.02, 1e9), Rates(900.0, 0.022, 0.9e9)
    nodes = [node("p0", rates=fast, placed=9), node("p1", rates=slow), node("d0", rates=fast, placed=9)]
    nodes.append(node("d1", rates=slow))
    assert where(place(LONG, nodes)) == ("p1", "d1")
    assert where(place(Demand(1024, prompt_only=True), nodes)) == ("p1", None)
    assert where(place(Demand(1024, local_only=True), nodes)) == (None, "d1")
    assert where(place(LONG, [*nodes[:1], replace(nodes[1], waiting_tokens=1), *nodes[2:]])) == ("p0", "d1")
    assert where(place(LONG, [*nodes[:3], replace(nodes[3], streams=1)])) == ("p1", "d0")
    assert where(place(LONG, [replace(nodes[0], cached_len=16), *nodes[1:]])) == ("p0", "d1")


@pytest.mark.parametrize(
    ("nodes", "error"),
    [
        ([], NoNodes),
        ([node("p1")], NoNodes),
        ([node("d1", state="draining")], NoNodes),
        ([node("d1", load=Load(free_blocks=64, total_blocks=64))], ContextLengthExceeded),
        ([node("d1", load=Load(active_blocks=1000, total_blocks=1000), pending=2950)], Overloaded),
    ],
)
def test_refusals(nodes: list[NodeView], error: type[KvferryError]) -> None:
    with pytest.raises(error) as caught:
        place(LONG, nodes)
    if error is Overloaded:
        assert 1 <= caught.value.retry_after <= 30


def test_unknown_pool_size_is_no_limit() -> None:
    assert where(place(LONG, [node("d1", load=Load())])) == (None, "d1")


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeView]:
    nodes = []
    for role in ("p", "d"):
        for i in range(draw(st.integers(0 if role == "p" else 1, 4))):
            active = draw(st.integers(0, 1000))
            cached = draw(st.integers(0, 1000 - active))
            nodes.append(
                node(
                    f"{role}{i}",
                    cached=draw(st.integers(0, 2000)),
                    waiting=draw(st.sampled_from([0, 0, 7, 300, 5000])),
                    streams=draw(st.integers(0, 40)),
                    pending=draw(st.integers(0, 200)),
                    state=draw(st.sampled_from(["ready", "ready", "ready", "draining"])),
                    rates=Rates(
                        draw(st.sampled_from([500.0, 1000.0, 3000.0])),
                        draw(st.sampled_from([0.01, 0.03])),
                        draw(st.sampled_from([1e6, 3e7, 1e9])),
                    ),
                    load=Load(
                        active_blocks=active,
                        cached_blocks=cached,
                        free_blocks=1000 - active - cached,
                        total_blocks=1000,
                    ),
                )
            )
    return nodes


demands = st.builds(
    Demand,
    st.integers(1, 2000),
    st.booleans(),
    st.sampled_from([0, 0, 64]),
    st.sets(st.sampled_from(["p0", "p1", "d0", "d1"]).map(lambda node_id: (node_id, 1))).map(frozenset),
)


def attempt(demand: Demand, nodes: list[NodeView]) -> Placement | None:
    try:
        return place(demand, nodes)
    except (NoNodes, Overloaded):
        return None


@given(demands, clusters())
def test_never_a_draining_or_excluded_node(demand: Demand, nodes: list[NodeView]) -> None:
    placement = attempt(demand, nodes)
    for lease in (placement.prefill, placement.decode) if placement else ():
        if lease:
            assert lease.state == "ready"
            assert (lease.node_id, lease.epoch) not in demand.excluded


def pair_s(p: NodeView, d: NodeView, demand: Demand, least_s: float = 0.0) -> float:
    """Cost of a pair, by the formula."""
    block_s = p.lease.block_bytes / p.lease.rates.ship_bytes_per_s
    exposed = exposed_s(shipped_blocks(d, demand), CHUNK_TOKENS // BLOCK, block_s, compute_s(p, demand))
    first_s = queue_s(p, demand) + compute_s(p, demand) + displaced_s(p, demand) - saved_s(p, demand, least_s)
    return first_s + (wait_s(d, demand) + HANDOFF_S) + exposed


def local_s(d: NodeView, demand: Demand) -> float:
    own_s = interference_s(d, compute_s(d, demand)) + displaced_s(d, demand)
    return queue_s(d, demand) + wait_s(d, demand) + compute_s(d, demand) + own_s


some_broken = st.sets(
    st.tuples(st.sampled_from([None, ("p0", 1), ("p1", 1), ("p2", 1)]), st.sampled_from([None, ("d0", 1), ("d1", 1)])),
    max_size=4,
).map(frozenset)


worths = st.sampled_from([0.0, 0.5, 2.0])


@given(
    st.builds(Demand, st.integers(1, 2000), broken=st.one_of(st.just(frozenset()), some_broken), worth=worths),
    clusters(),
)
def test_no_pair_is_cheaper(demand: Demand, nodes: list[NodeView]) -> None:
    """Against every pair tried one by one: the cost is that of the pair that was chosen, and no more above the least
    than equal nodes' learned rates differ. (None, None) breaks no pair: nobody says so."""
    placement = attempt(demand, nodes)
    if placement is None:
        return
    ready = [view for view in nodes if view.lease.state == "ready"]
    takes = [view for view in ready if view.lease.role == "decode" and attempt(demand, [view])]
    costs: dict[tuple[str | None, str | None], float] = {(None, d.lease.node_id): local_s(d, demand) for d in takes}
    prefills = [view for view in ready if view.lease.role == "prefill" and fits(view, demand)]
    least_s = min((queue_s(p, demand) for p in prefills), default=0.0)
    for p in prefills:
        whole = [d for d in takes if not {(p.key, d.key), (p.key, None), (None, d.key)} & demand.broken]
        costs |= {(p.lease.node_id, d.lease.node_id): pair_s(p, d, demand, least_s) for d in whole}
    assert placement.cost_s == pytest.approx(costs[where(placement)], rel=1e-12)
    least_s = min(costs.values())
    assert least_s * (1 - 1e-12) <= placement.cost_s <= least_s * (1 + NOISE)
    chosen = [view for view in ready if view.lease.node_id in where(placement)]
    cheapest = [view for view in ready if view.lease.node_id in min(costs, key=costs.__getitem__)]
    if all(costs[pair] > least_s * (1 + NOISE) for pair in costs if pair != where(placement)):
        assert chosen == cheapest


@given(st.builds(Demand, st.integers(1, 2000), worth=worths), clusters(), st.data())
def test_more_load_never_attracts(demand: Demand, nodes: list[NodeView], data: st.DataObject) -> None:
    before = attempt(demand, nodes)
    i = data.draw(st.integers(0, len(nodes) - 1))
    busier = replace(nodes[i], waiting_tokens=nodes[i].waiting_tokens + 500, streams=nodes[i].streams + 3)
    after = attempt(demand, [*nodes[:i], busier, *nodes[i + 1 :]])
    assert (before is None) == (after is None)
    if before and after and busier.lease.node_id not in where(before):
        assert busier.lease.node_id not in where(after)


@given(st.integers(17, 2000), st.integers(0, 2000), st.integers(0, 4000))
def test_affinity_is_never_worth_more_than_it_saves(total: int, cached: int, waiting: int) -> None:
    """The node with the prefix is chosen only while its queue is shorter than the seconds it saves: those of computing,
    less those in which the other one's computing would have hidden the shipping."""
    warm, cold, decode = node("p1", cached=cached, waiting=waiting), node("p2"), node("d1", streams=200)
    demand = Demand(total)
    chosen = place(demand, [warm, cold, decode])
    work = {view: pair_s(view, decode, demand) - queue_s(view, demand) for view in (warm, cold)}
    saved = work[cold] - work[warm]
    assert chosen.prefill is not None
    if chosen.prefill.node_id == "p1":
        assert queue_s(warm, demand) <= saved + 1e-9
    else:
        assert queue_s(warm, demand) >= saved - 1e-9


@pytest.mark.parametrize("equal", [True, False])
def test_a_thousand_nodes_of_each_role_cost_milliseconds(equal: bool) -> None:
    """Equal ones are as many ties as pairs, different ones as many costs."""
    nodes = [
        node(
            f"{role}{i}",
            waiting=0 if equal else i % 97,
            streams=0 if equal else i % 41,
            cached=0 if equal or i % 50 else 16 * (i // 50),
            rates=Rates(1000.0 + (0 if equal else i), 0.02, 1e9),
        )
        for role in "pd"
        for i in range(1000)
    ]

    def seconds() -> float:
        began = time.process_time()
        place(LONG, nodes)
        return time.process_time() - began

    assert min(seconds() for _ in range(8)) < 0.1


def test_a_node_that_has_just_started_is_not_slow_because_nothing_runs_there_yet() -> None:
    """The streams of a lost node had all been booked there: a newcomer was told to come back in twenty minutes."""
    started = node("d1", load=Load(free_blocks=1000, total_blocks=1000), pending=1500)
    assert place(LONG, [started]).first_token_s < 30
