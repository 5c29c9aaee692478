"""What a prompt drives out of a cache is counted where it is likely to be wanted again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.placement.cache_value import MAX_REUSES, CacheValue, displaced_blocks, displaced_s, saved_s
from kvferry.placement.place import place
from kvferry.placement.types import Demand, NodeView
from kvferry.protocol.lease import Load, NodeLease, Rates


def node(name: str, role: str = "prefill", free: int = 0, cached: int = 100, **view: Any) -> NodeView:
    load = Load(free_blocks=free, cached_blocks=cached, total_blocks=free + cached)
    lease = NodeLease(name, role, 1, "ready", "", "", "f", "m", 10_000, 16, 1 << 10, load, Rates(1000.0, 0.01, 1e9))
    return NodeView(lease, **view)


def test_only_what_exceeds_the_free_blocks_is_displaced() -> None:
    demand = Demand(320)
    assert displaced_blocks(node("a", free=20), demand) == 0
    assert displaced_blocks(node("a", free=5), demand) == 15
    assert displaced_blocks(node("a", free=5, waiting_tokens=48), demand) == 18
    assert displaced_blocks(node("a", free=5, cached_len=160), demand) == 5
    assert displaced_blocks(node("a", cached=7), demand) == 7


def test_it_costs_nothing_where_nothing_is_reused() -> None:
    assert displaced_s(node("a"), Demand(320)) == 0.0
    assert displaced_s(node("a"), Demand(320, worth=0.5)) == pytest.approx(0.5 * 320 / 1000)


def test_a_second_copy_is_made_later_the_more_it_drives_out() -> None:
    """The holder's queue costs more than computing the prefix anew, and less than that and what it displaces."""
    holder, other = node("a", waiting_tokens=400, cached_len=304), node("b")
    decode = node("d", "decode", free=100)
    demand = Demand(320)
    assert place(demand, [holder, other, decode]).prefill == other.lease
    assert place(replace(demand, worth=1.0), [holder, other, decode]).prefill == holder.lease
    empty = node("b", free=100)
    assert place(replace(demand, worth=1.0), [holder, empty, decode]).prefill == empty.lease


def test_worth_is_what_was_reused_over_what_was_computed() -> None:
    worth = CacheValue()
    assert worth.times == 0.0
    for _ in range(50):
        worth.record(0, 100)
    assert worth.times == 0.0
    for _ in range(1000):
        worth.record(50, 100)
    assert worth.times == pytest.approx(1.0, abs=0.01)
    for _ in range(1000):
        worth.record(99, 100)
    assert worth.times == MAX_REUSES


def test_where_all_queues_are_long_what_is_cached_may_wait_longer() -> None:
    """The holder's queue is a second longer than the shortest one, which is as long as half a prompt, or ten."""
    demand, decode = Demand(320, worth=1.0), node("d", "decode", free=1000, streams=200)

    def chosen(least: int, ahead: int) -> str:
        holder = node("a", free=1000, cached_len=304, waiting_tokens=least + ahead)
        other = node("b", free=1000, waiting_tokens=least)
        prefill = place(demand, [holder, other, decode]).prefill
        assert prefill
        return prefill.node_id

    assert chosen(160, 1000) == "b"
    assert chosen(3200, 1000) == "a"
    assert chosen(3200, 4000) == "b"


def test_nothing_is_spared_where_nothing_is_known_to_be_shared() -> None:
    assert saved_s(node("a", cached_len=160), Demand(320), 3.0) == 0.0
    assert saved_s(node("a", cached_len=160), Demand(320, worth=0.1), 3.0) == pytest.approx(1.5)
