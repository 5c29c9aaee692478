"""Placement counts of a recurrent model's prefix what a checkpoint on the node covers, by rows of the block index."""

from __future__ import annotations

import random

import pytest

from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.protocol.hashing import chain, state_hashes
from kvferry.protocol.index_rows import row_at, rows_of
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.dispatch.prefixes import Prefixes
from kvferry.router.nodes.checkpoints import NEAR, Checkpoints

HASHES = chain(b"root", random.Random(1).choices(range(99), k=4 * 300), 4)


@pytest.mark.parametrize("blocks", [1, 2, 16, 17, 40])
def test_a_checkpoint_s_row_is_that_of_its_last_block_in_its_chain(blocks: int) -> None:
    for count in (1, 2, 15, 16, 17, 18, 33, 300):
        whole = [*HASHES[:count], *state_hashes(HASHES[count - 1], blocks)]
        assert Checkpoints(blocks, 64).row(HASHES, count) == rows_of(whole)[-1]


def test_rows_of_a_chain_by_position() -> None:
    assert [row_at(HASHES.__getitem__, place) for place in range(300)] == rows_of(HASHES)


def test_checkpoints_are_looked_for_near_the_ends_and_at_strides() -> None:
    places = Checkpoints(3, 64).places({70, 300})
    assert places == sorted({*range(63, 71), *range(293, 301), 64, 128, 192, 256})
    assert Checkpoints(3, 64).places({2}) == [1, 2]
    assert NEAR == 8


async def test_nodes_can_reuse_what_a_checkpoint_covers() -> None:
    store = MemoryStore()
    states = Checkpoints(3, 64)

    async def publish(node: str, length: int, *checkpoints: int) -> None:
        rows = dict.fromkeys(rows_of(HASHES[:length]))
        for count in checkpoints:
            rows.update(dict.fromkeys(rows_of([*HASHES[:count], *state_hashes(HASHES[count - 1], 3)])))
        await store.publish(node, 7, list(rows), [])

    await publish("session", 100, 64, 98)
    await publish("diverged", 90, 64)
    await publish("none", 50)
    await publish("part", 66, 64)
    await store.publish("part", 7, [], rows_of([*HASHES[:64], *state_hashes(HASHES[63], 3)])[-1:])
    await publish("old", 90, 64)
    nodes = {"session": 7, "diverged": 7, "none": 7, "part": 7, "old": 8}
    prefixes = Prefixes(store, RouterMetrics(), 5.0)
    assert await prefixes.held(HASHES[:120], nodes) == {"session": 100, "diverged": 90, "none": 50, "part": 66}
    assert await prefixes.held(HASHES[:120], nodes, states=states) == {"session": 98, "diverged": 64}
    assert await prefixes.held(HASHES[:97], nodes, states=states) == {"session": 64, "diverged": 64}
    assert await prefixes.held(HASHES[:20], nodes, states=states) == {}
