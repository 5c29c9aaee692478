"""Who holds a prefix, by the index and by what a router remembers."""

from __future__ import annotations

import pytest

from kvferry.protocol.errors import RegistryUnavailable
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.dispatch.prefixes import FALLBACK_S, MAX_NODES, Prefixes, Remembered
from tests.fake_workers import PROMPT, Bench, collect, decode, prefill
from tests.waiting import until

A, B = ("a", 1), ("b", 2)
LIVE = {"a": 1, "b": 2}
HASHES = [bytes([n]) * 16 for n in range(10)]
OTHER = [*HASHES[:4], *(bytes([n]) * 16 for n in range(100, 106))]


def test_the_deepest_block_says_who_holds_the_prefix() -> None:
    known = Remembered()
    known.note(HASHES, (A,))
    known.note(OTHER, (B,))
    assert known.held(HASHES, LIVE) == {"a": 10, "b": 4}, "both hold what the two have in common"
    assert known.held([*OTHER, b"x" * 16], LIVE) == {"b": 10, "a": 4}
    assert known.held(HASHES[:4], LIVE) == {"a": 4, "b": 4}
    known.note(HASHES, (A, B))
    assert known.held(HASHES, LIVE) == {"a": 10, "b": 10}
    assert known.held([b"x" * 16], LIVE) == known.held([], LIVE) == {}


def test_a_node_that_began_anew_holds_nothing() -> None:
    known = Remembered()
    known.note(HASHES[:6], (B,))
    known.note(HASHES, (A,))
    assert known.held(HASHES, {"a": 7, "b": 2}) == {"b": 6}
    assert known.held(HASHES, {"a": 7, "b": 3}) == {}


def test_the_nodes_of_a_block_are_bounded_and_the_last_ones_stay() -> None:
    known = Remembered()
    for epoch in range(3 * MAX_NODES):
        known.note(HASHES, (A, ("n", epoch)))
    assert known.held(HASHES[:1], {"a": 1, "n": 3 * MAX_NODES - 1}) == {"a": 1, "n": 1}
    assert len(known._known(HASHES[0])) == MAX_NODES


def test_what_is_remembered_is_bounded() -> None:
    known = Remembered(max_blocks=40)
    for n in range(100):
        known.note([bytes([n, m]) * 8 for m in range(7)], (A,))
        assert len(known) <= 40
        assert known.held([bytes([n, m]) * 8 for m in range(7)], LIVE) == {"a": 7}
    assert known.held([bytes([0, m]) * 8 for m in range(7)], LIVE) == {}
    known.note([bytes([n]) * 16 for n in range(100)], (A,))
    assert len(known) <= 40


def test_a_long_prompt_that_comes_again_drives_nothing_out() -> None:
    known = Remembered(max_blocks=40)
    known.note([b"x" * 16], (B,))
    for _ in range(3):
        known.note(HASHES + OTHER[4:], (A,))
    assert known.held([b"x" * 16], LIVE) == {"b": 1}
    assert known.held(HASHES, LIVE) == {"a": 10}


class Index:
    answer: dict[str, int] | None = None
    asked = 0

    async def longest_prefix(self, hashes: object, nodes: object) -> dict[str, int]:
        self.asked += 1
        if self.answer is None:
            raise RegistryUnavailable("away")
        return dict(self.answer)

    async def holders(self, rows: object, nodes: object) -> list[frozenset[str]]:
        raise AssertionError("of no model with recurrent layers")


async def test_memory_speaks_while_the_index_does_not_and_a_while_after() -> None:
    index, now = Index(), [100.0]
    prefixes = Prefixes(index, RouterMetrics(), 1.0, clock=lambda: now[0])
    prefixes.note(HASHES, (A,))
    index.answer = {"b": 2}
    assert await prefixes.held(HASHES, LIVE) == {"b": 2}, "the index knows what nodes dropped"
    index.answer = None
    assert await prefixes.held(HASHES, LIVE) == {"a": 10}
    index.answer = {"b": 2}
    assert await prefixes.held(HASHES, LIVE) == {"a": 10, "b": 2}, "rows may be lost still"
    now[0] += FALLBACK_S
    assert await prefixes.held(HASHES, LIVE) == {"b": 2}
    before = index.asked
    assert await prefixes.held(HASHES, LIVE, up=False) == {"a": 10}
    assert index.asked == before


@pytest.mark.parametrize("nodes", [2, 4])
async def test_without_a_registry_requests_return_to_where_their_prefix_is(nodes: int) -> None:
    workers = [decode(f"d{n}", changes={"block_bytes": 1}) for n in range(nodes)]
    async with Bench(workers) as bench:
        bench.store.available = False
        await until(lambda: not bench.nodes.registry_health.up)
        first = bench.start(3)
        await collect(first)
        assert first.route is not None
        for _ in range(2 * nodes):
            again = bench.start(3, prompt=(*PROMPT, 1, 2))
            await collect(again)
            assert again.route is not None
            assert again.route.decode == first.route.decode


@pytest.mark.parametrize(("count", "holders"), [(1, {"p1"}), (3, {"p1", "d1"})])
async def test_a_decode_node_is_credited_once_the_prompt_goes_there(count: int, holders: set[str]) -> None:
    """A request that ends with its first token ends on its prefill node."""
    changes = {"block_bytes": 1}
    async with Bench([prefill("p1", changes=changes), decode("d1", changes=changes)]) as bench:
        bench.store.available = False
        await until(lambda: not bench.nodes.registry_health.up)
        await collect(bench.start(count))
        (nodes,) = set(bench.cluster._prefixes._remembered._recent.values())
        assert {node_id for node_id, _ in nodes} == holders
