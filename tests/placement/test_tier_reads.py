"""What nodes read from their disks, in seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.placement.costs import compute_s
from kvferry.placement.place import place
from kvferry.placement.tier_reads import tier_read
from kvferry.placement.types import Demand, NodeView, TierPrefix
from kvferry.protocol.lease import Rates
from tests.placement.test_place import node, where

DEMAND = Demand(1024)
READ_S = 0.004
"""Of a block of 16 tokens, which takes 0.016 s to compute."""


def keeps(name: str, kept: int = 960, read_s: float = READ_S, **how: Any) -> NodeView:
    view = node(name, rates=Rates(1000.0, 0.02, 1e9), **how)
    return replace(view, kept=(TierPrefix(kept, read_s),))


def test_what_is_on_disk_is_read_where_computing_takes_longer() -> None:
    assert tier_read(keeps("p1"), DEMAND) == (960, pytest.approx(60 * READ_S + 0.064))
    assert tier_read(keeps("p1", cached=160), DEMAND) == (960, pytest.approx(50 * READ_S + 0.064))
    assert compute_s(keeps("p1"), DEMAND) == pytest.approx(60 * READ_S + 0.064)


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (keeps("p1", read_s=0.017), "a slow disk"),
        (keeps("p1", read_s=0.0), "no disk"),
        (keeps("p1", kept=0), "nothing on it"),
        (keeps("p1", kept=320, cached=320), "no more than in the pool"),
    ],
)
def test_else_it_is_computed(view: NodeView, why: str) -> None:
    held = view.cached_len
    assert tier_read(view, DEMAND) == (held, pytest.approx((1024 - held) / 1000)), why


def test_the_block_of_the_last_token_is_computed_though_it_is_on_disk() -> None:
    assert tier_read(keeps("p1", kept=1024), DEMAND).cached_len == 1008


def test_a_pool_is_better_than_a_disk_and_a_disk_than_computing() -> None:
    pool, disk, none, decode = node("p1", cached=960), keeps("p2"), node("p3"), node("d1")
    placement = place(DEMAND, [none, disk, pool, decode])
    assert (where(placement), placement.cached_len) == (("p1", "d1"), 960)
    placement = place(DEMAND, [none, disk, decode])
    assert (where(placement), placement.cached_len) == (("p2", "d1"), 960)
    slow = keeps("p2", read_s=0.02, waiting=100)
    placement = place(DEMAND, [none, slow, decode])
    assert (where(placement), placement.cached_len) == (("p3", "d1"), 0)


def test_a_busy_pool_loses_to_an_idle_disk() -> None:
    placement = place(DEMAND, [node("p1", cached=960, waiting=300), keeps("p2"), node("d1")])
    assert where(placement) == ("p2", "d1")


def test_what_decode_has_on_disk_is_shipped_all_the_same() -> None:
    """A grant's blocks come over the link: the disk is for prompts that are computed there."""
    decodes = [keeps("d1", streams=30), node("d2", cached=480, streams=30)]
    assert where(place(DEMAND, [node("p1"), *decodes])) == ("p1", "d2")


def test_nobody_fetches_from_a_disk() -> None:
    placement = place(Demand(1024, fetches=True), [node("p1"), keeps("p2", waiting=5000), node("d1")])
    assert (where(placement), placement.holder) == (("p1", "d1"), None)


def test_fetching_is_compared_with_reading() -> None:
    nodes = [keeps("p1"), node("p2", cached=960, waiting=5000), node("d1")]
    fast = place(Demand(1024, fetches=True), nodes)
    assert (where(fast), fast.holder is not None, fast.cached_len) == (("p1", "d1"), True, 960)
    quick = keeps("p1", read_s=1e-6)
    assert place(Demand(1024, fetches=True), [quick, *nodes[1:]]).holder is None


def test_each_tier_is_read_for_what_the_quicker_ones_lack() -> None:
    view = replace(
        node("p1", cached=160, rates=Rates(1000.0, 0.02, 1e9)), kept=(TierPrefix(480, 0.001), TierPrefix(960, READ_S))
    )
    assert tier_read(view, DEMAND) == (960, pytest.approx(20 * 0.001 + 30 * READ_S + 0.064))
    slow = replace(view, kept=(TierPrefix(480, 0.001), TierPrefix(960, 0.02)))
    assert tier_read(slow, DEMAND) == (480, pytest.approx(20 * 0.001 + 0.544))
    shorter = replace(view, kept=(TierPrefix(960, 0.001), TierPrefix(480, READ_S)))
    assert tier_read(shorter, DEMAND) == (960, pytest.approx(50 * 0.001 + 0.064))


STORED = Demand(1024, stored_len=768)
"""A store has that much of it."""


def stores(name: str, read_s: float = READ_S, **how: Any) -> NodeView:
    return node(name, rates=Rates(1000.0, 0.02, 1e9, store_block_s=read_s), **how)


def test_any_node_reads_what_a_store_has() -> None:
    assert tier_read(stores("p1"), STORED) == (768, pytest.approx(48 * READ_S + 0.256))
    assert tier_read(stores("p1", cached=320), STORED) == (768, pytest.approx(28 * READ_S + 0.256))
    own = replace(stores("p1"), kept=(TierPrefix(960, 0.001),))
    assert tier_read(own, STORED) == (960, pytest.approx(60 * 0.001 + 0.064))
    for without in (stores("p1", read_s=0.0), stores("p1", read_s=0.017), stores("p1", cached=800)):
        held = without.cached_len
        assert tier_read(without, STORED) == (held, pytest.approx((1024 - held) / 1000))


def test_a_busy_pool_loses_to_an_idle_node_that_reads_from_the_store() -> None:
    nodes = [stores("p1", cached=960, waiting=600), stores("p2"), node("d1")]
    assert where(place(DEMAND, nodes)) == ("p1", "d1")
    placement = place(STORED, nodes)
    assert (where(placement), placement.cached_len) == (("p2", "d1"), 768)
    assert placement.first_token_s == pytest.approx(48 * READ_S + 0.256)


def test_nodes_that_would_read_the_same_take_turns() -> None:
    def turn(placed: int, block_s: float) -> NodeView:
        view = node(f"p{placed}", rates=Rates(1000.0, 0.02, 1e9), placed=placed)
        return replace(view, kept=(TierPrefix(960, block_s),))

    nodes = [turn(2, READ_S), turn(1, READ_S * 1.05), node("d1")]
    assert where(place(DEMAND, nodes)) == ("p1", "d1")


@given(st.integers(0, 1100), st.integers(0, 1100), st.floats(0, 0.1), st.floats(10, 1e5), st.integers(1, 1100))
def test_reading_is_never_slower_than_computing(
    cached: int, kept: int, read_s: float, rate: float, length: int
) -> None:
    view = replace(node("p1", cached=cached, rates=Rates(rate, 0.02, 1e9)), kept=(TierPrefix(kept, read_s),))
    demand = Demand(length)
    found = tier_read(view, demand)
    assert found.seconds <= compute_s(replace(view, kept=()), demand)
    assert found.cached_len < length
