"""Prompts that are on their way into a node's cache are seen by those that follow."""

from __future__ import annotations

import asyncio

from kvferry.router.dispatch.inflight_prefixes import MAX_COMPARED, InflightPrefixes
from tests.fake_workers import PROMPT, Bench, collect, decode, prefill, until

ABC = (b"a", b"b", b"c")


def test_the_longest_shared_prefix_counts_for_each_node() -> None:
    inflight_prefixes = InflightPrefixes()
    inflight_prefixes.sent((*ABC, b"d"), ("p1", 1))
    inflight_prefixes.sent((b"a", b"x"), ("p2", 1))
    inflight_prefixes.sent((b"y",), ("p3", 1))
    assert inflight_prefixes.held(ABC, {"p1": 1, "p2": 1, "p3": 1}) == {"p1": 3, "p2": 1}
    assert inflight_prefixes.held((), {"p1": 1}) == {}


def test_a_process_that_followed_holds_nothing() -> None:
    inflight_prefixes = InflightPrefixes()
    inflight_prefixes.sent(ABC, ("p1", 1))
    assert inflight_prefixes.held(ABC, {"p1": 2}) == {}


def test_what_is_over_leaves_nothing_behind() -> None:
    inflight_prefixes = InflightPrefixes()
    first, second = inflight_prefixes.sent(ABC, ("p1", 1)), inflight_prefixes.sent(ABC, ("p2", 1))
    nothing = inflight_prefixes.sent((), ("p1", 1))
    first.remove()
    first.remove()
    nothing.remove()
    assert inflight_prefixes.held(ABC, {"p1": 1, "p2": 1}) == {"p2": 3}
    second.remove()
    assert not inflight_prefixes._rows


def test_of_many_the_last_ones_are_looked_at() -> None:
    inflight_prefixes = InflightPrefixes()
    inflight_prefixes.sent(ABC, ("first", 1))
    for _ in range(MAX_COMPARED):
        inflight_prefixes.sent(ABC, ("p", 1))
    assert inflight_prefixes.held(ABC, {"first": 1, "p": 1}) == {"p": 3}


async def test_a_cluster_remembers_a_prompt_until_its_first_token() -> None:
    gate = asyncio.Event()

    async def waits(worker, request):  # type: ignore[no-untyped-def]
        from tests.fake_workers import honest_prefill

        await gate.wait()
        async for answer in honest_prefill(worker, request):
            yield answer

    async with Bench([prefill("p1", prefill_script=waits), decode("d1")]) as bench:
        task = asyncio.create_task(collect(bench.start(4, PROMPT)))
        await until(lambda: bool(bench.cluster.inflight_prefixes._rows))
        ((row,),) = [tuple(row) for row in bench.cluster.inflight_prefixes._rows.values()]
        assert row.node[0] == "p1"
        held = (await bench.cluster.reuse({"fp": row.hashes}, {}))["fp"]
        assert held["p1"] == len(row.hashes)
        gate.set()
        await task
        assert not bench.cluster.inflight_prefixes._rows
