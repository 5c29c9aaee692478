"""Streams with a target of the time between tokens go where the target is met, or are rejected with an honest time."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from kvferry.placement.blocks import EXPECTED_OUTPUT
from kvferry.placement.place import place
from kvferry.placement.rejections import TargetMissed
from kvferry.placement.stream_targets import ROUNDING, streams_over
from kvferry.placement.types import Demand, NodeView
from kvferry.protocol.lease import Rates
from tests.placement.test_place import node, where

ALONE_S, STREAM_S = 0.010, 0.001
LEARNED = Rates(1000.0, 0.05, 1e9, alone_s=ALONE_S, stream_s=STREAM_S)
ASKED = Demand(1024, itl_s=0.020)
"""Eleven streams are 20 ms apart."""


def decode(name: str, streams: int, rates: Rates = LEARNED, *, cached: int = 0, seats: int = 0) -> NodeView:
    return node(name, streams=streams, rates=rates, cached=cached, max_num_seqs=seats)


@pytest.mark.parametrize(
    ("rates", "seats", "itl_s", "most"),
    [
        (LEARNED, 0, 0.020, 11),
        (LEARNED, 8, 0.020, 8),
        (LEARNED, 0, 0.0109, 1),
        (LEARNED, 0, 0.011, 2),
        (LEARNED, 0, 0.001, 1),
        (replace(LEARNED, stream_s=0.0), 0, 0.010, inf),
        (replace(LEARNED, stream_s=0.0), 4, 0.009, 1),
        (Rates(step_s=0.02), 16, 0.02, 16),
        (Rates(step_s=0.02), 16, 0.019, 1),
    ],
)
def test_a_node_takes_as_many_streams_as_its_learned_rates_allow(
    rates: Rates, seats: int, itl_s: float, most: float
) -> None:
    for streams in (0, 1, 3, 7, 10, 11, 20, 200):
        view = decode("d1", streams, rates, seats=seats)
        over = max(0, streams + 1 - most)
        assert streams_over(view, itl_s) == over
        assert (view.next_itl_s <= itl_s * ROUNDING) == (over == 0)


def test_a_node_that_meets_the_target_is_preferred_whatever_it_costs() -> None:
    """The busy node holds the prompt, and would be taken without a target."""
    nodes = [node("p1"), decode("d1", 11, cached=1008), decode("d2", 10)]
    assert where(place(replace(ASKED, itl_s=inf), nodes)) == (None, "d1")
    assert where(place(ASKED, nodes))[1] == "d2"


def test_no_node_meets_it() -> None:
    nodes = [node("p1"), decode("d1", 22), decode("d2", 33)]
    with pytest.raises(TargetMissed) as caught:
        place(ASKED, nodes)
    twelve_end_s = 12 * EXPECTED_OUTPUT * (ALONE_S + 21 * STREAM_S) / 22
    assert caught.value.retry_after == pytest.approx(twelve_end_s)
    assert (caught.value.status, caught.value.code) == (429, "overloaded")


def test_an_idle_node_takes_a_stream_although_it_is_slower_than_the_target() -> None:
    """No later time would be better, so no Retry-After would be honest."""
    assert where(place(replace(ASKED, itl_s=0.001), [decode("d1", 1), decode("d2", 0)])) == (None, "d2")
    with pytest.raises(TargetMissed):
        place(replace(ASKED, itl_s=0.001), [decode("d1", 1)])


def test_a_stream_that_has_begun_goes_on_where_it_can() -> None:
    begun = replace(ASKED, recovers=True)
    assert where(place(begun, [decode("d1", 30)])) == (None, "d1")
    assert where(place(begun, [decode("d1", 30, cached=1008), decode("d2", 10)])) == (None, "d2")
