"""Room for what goes with a request's blocks: recurrent states, and pages of layers with windows."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.placement.blocks import fits, missing_blocks, new_blocks, shipped_blocks
from kvferry.placement.costs import wait_s
from kvferry.placement.place import place
from kvferry.placement.types import Demand
from kvferry.placement.uncached_nodes import decode_halves
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.layer_groups import LayerGroups
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.lease import Load
from tests.placement.test_place import BLOCK, node, where

WINDOWS: dict[str, Any] = {"state_blocks": 5, "state_stride": 8, "window_pages": 33}
"""Of Gemma 3 27B, whose layers have windows of 512 tokens here."""
STATE: dict[str, Any] = {"state_blocks": 12, "state_stride": 64}


@pytest.mark.parametrize("tokens", [1, 15, 16, 100, 528, 529, 544, 700, 32_768])
def test_a_router_counts_the_blocks_that_a_node_takes(tokens: int) -> None:
    groups = LayerGroups(tuple(0 if (i + 1) % 6 == 0 else 512 for i in range(62)))
    layout = KVLayout(groups.full, 1, 256, "bfloat16", BLOCK, groups=groups)
    lease = node("d1", state_blocks=groups.count, window_pages=layout.window_pages).lease
    counted = lease.blocks_with(-(-tokens // BLOCK))
    assert 0 <= counted - layout.blocks_for(tokens) <= 2 * groups.count, "a page more at most where it begins, and ends"


def test_pages_of_a_window_and_a_state_are_counted() -> None:
    short, long = Demand(100), Demand(3200)
    assert new_blocks(node("d1", **WINDOWS), short) == 7 * 6
    assert new_blocks(node("d1", **WINDOWS), long) == 201 + 33 * 5
    assert shipped_blocks(node("d1", **WINDOWS), long) == 200 + 33 * 5
    assert new_blocks(node("d1", cached=3136, **WINDOWS), long) == 5 * 6
    assert new_blocks(node("d1", **STATE), short) == 7 + 12
    assert new_blocks(node("d1"), short) == 7


def test_a_node_without_room_for_the_pages_is_not_taken_for_free() -> None:
    tight = Load(free_blocks=20, active_blocks=80, total_blocks=100)
    demand = Demand(200)
    assert missing_blocks(node("d1", load=tight, **WINDOWS), demand) == 13 * 6 - 20
    assert wait_s(node("d1", load=tight, **WINDOWS), demand) > wait_s(node("d1", load=tight), demand)
    assert decode_halves(demand, [node("d1", load=tight, **WINDOWS)])[0][:2] == (
        wait_s(node("d1", load=tight, **WINDOWS), demand),
        shipped_blocks(node("d1", load=tight, **WINDOWS), demand),
    )
    free = node("d2", streams=2, load=Load(free_blocks=100, total_blocks=100), **WINDOWS)
    assert where(place(demand, [node("d1", load=tight, **WINDOWS), free])) == (None, "d2")


def test_the_longest_prompt_has_room_for_its_windows() -> None:
    pool = Load(free_blocks=300, total_blocks=300)
    small = node("d1", load=pool, **WINDOWS)
    assert small.pool_tokens == (300 - 33 * 5) * BLOCK
    assert fits(small, Demand(small.pool_tokens - 1))
    assert not fits(small, Demand(small.pool_tokens))
    assert node("d1", load=pool, **STATE).pool_tokens == 288 * BLOCK
    tiny = node("d1", load=Load(free_blocks=60, total_blocks=60), **WINDOWS)
    assert tiny.pool_tokens == 10 * BLOCK, "all of it are pages"
    with pytest.raises(KvferryError):
        place(Demand(161), [tiny])
