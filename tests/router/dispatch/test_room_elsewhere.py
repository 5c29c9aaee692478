"""A request whose grant does not come leaves its crowded decode node for one that has room: once, and for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

import kvferry.router.dispatch.hedging
import kvferry.router.dispatch.timers
from kvferry.protocol.lease import Load
from kvferry.protocol.messages import PrefillRequest
from kvferry.router.dispatch.retry_budget import RetryBudget
from tests.fake_workers import (
    PROMPT,
    SILENCE,
    Bench,
    FakeWorker,
    collect,
    decode,
    expected,
    honest_prefill,
    ids,
    prefill,
)
from tests.waiting import until

CROWDED = Load(waiting_requests=2, active_blocks=90, granted_blocks=0, free_blocks=10, total_blocks=100)
FULL = Load(waiting_requests=9, active_blocks=100, granted_blocks=390, free_blocks=0, total_blocks=100)
ROOMY = Load(free_blocks=100, total_blocks=100)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvferry.router.dispatch.hedging, "MIN_LATE_S", 0.2)
    monkeypatch.setattr(kvferry.router.dispatch.hedging, "GRANT_S", 0.2)
    monkeypatch.setattr(kvferry.router.dispatch.timers, "LATE_REPEAT_S", 0.1)


async def no_grant_of_d1(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
    """The prefill node computes nothing before the decode node has reserved its blocks."""
    if request.target and request.target.node_id == "d1":
        yield SILENCE
    async for answer in honest_prefill(worker, request):
        yield answer


def bench(d2: Load) -> Bench:
    workers = [
        prefill("p1", prefill_script=no_grant_of_d1),
        decode("d1", changes={"load": CROWDED}),
        decode("d2", changes={"load": d2}),
    ]
    return Bench(workers)


async def load(cluster: Bench, node: str, now: Load) -> None:
    cluster[node].lease = replace(cluster[node].lease, load=now)
    await cluster.store.announce(cluster[node].lease)


async def test_it_goes_where_room_comes_up_after_a_bounded_time_and_without_a_budget() -> None:
    async with bench(FULL) as cluster:
        cluster.cluster.hedges = cluster.cluster.retries = RetryBudget(0.0, 0.0, 0.0)
        answer = asyncio.create_task(collect(cluster.start(6)))
        await until(lambda: cluster["p1"].prefills)
        await asyncio.sleep(0.5)
        assert [request.target.node_id for request in cluster["p1"].prefills] == ["d1"], "the other one is full"
        await load(cluster, "d2", ROOMY)
        assert ids(await answer) == expected(PROMPT, 6)
        asked = [(request.target.node_id, request.job.request_id) for request in cluster["p1"].prefills]
        assert [node for node, _ in asked] == ["d1", "d2"]
        assert cluster.retries() == {"room_elsewhere": 1}
        await until(lambda: cluster["p1"].answering == 0)
        for node in ("p1", "d1"):
            assert [cancel.request_id for cancel in cluster[node].cancels] == [asked[0][1]]
        assert not cluster["d2"].cancels
        assert not cluster.nodes.breakers.open().nodes


async def test_the_first_attempt_is_cancelled_before_the_second_one_asks() -> None:
    """Both would hold blocks otherwise."""
    async with bench(FULL) as cluster:
        answer = asyncio.create_task(collect(cluster.start(6)))
        await until(lambda: cluster["p1"].prefills)
        entry = cluster.nodes.entries[("d1", 1)]
        assert entry.reservations
        await load(cluster, "d2", ROOMY)
        await until(lambda: len(cluster["p1"].prefills) == 2)
        assert not entry.reservations
        assert ids(await answer) == expected(PROMPT, 6)


async def test_it_waits_where_it_is_while_all_are_crowded() -> None:
    async with bench(FULL) as cluster:
        cluster.cluster.hedges = RetryBudget(0.0, 0.0, 0.0)
        dispatch = cluster.start(6)
        answer = asyncio.create_task(collect(dispatch))
        await until(lambda: cluster["p1"].prefills)
        await asyncio.sleep(1.0)
        assert len(cluster["p1"].prefills) == 1
        assert cluster.retries() == {}
        await dispatch.cancel()
        await asyncio.gather(answer, return_exceptions=True)


async def test_it_leaves_two_crowded_nodes_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wanderer would lose its place in every queue."""
    async with bench(FULL) as cluster:
        cluster.cluster.hedges = RetryBudget(0.0, 0.0, 0.0)
        monkeypatch.setattr(kvferry.router.dispatch.hedging, "MAX_NODES_LEFT", 0)
        dispatch = cluster.start(6)
        answer = asyncio.create_task(collect(dispatch))
        await until(lambda: cluster["p1"].prefills)
        await load(cluster, "d2", ROOMY)
        await asyncio.sleep(0.6)
        assert len(cluster["p1"].prefills) == 1
        await dispatch.cancel()
        await asyncio.gather(answer, return_exceptions=True)
