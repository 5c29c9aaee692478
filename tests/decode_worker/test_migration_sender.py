"""Streams that move between two decode nodes, over real HTTP and UCX: every token once, nothing computed again, and
books that balance on both, whatever ends the move."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.protocol.messages import MoveRequest
from kvferry.protocol.wire import pack
from tests.decode_pair import MOST, Both, decode_pair, prompt
from tests.toy import expected, make_engine, make_job
from tests.waiting import until
from tests.worker_pair import Router, Worker, worker


@pytest.fixture
async def both() -> AsyncIterator[Both]:
    async with decode_pair() as nodes:
        yield nodes


def count(worker: Worker, name: str, outcome: str = "") -> float:
    metric = getattr(worker.node.metrics, name)
    return float((metric[outcome] if outcome else metric)._value.get())


async def test_a_stream_goes_on_at_the_other_node_and_nothing_is_computed_again(both: Both) -> None:
    source, target = both.source.decode, both.target.decode
    job = await both.streams("a")
    moving = asyncio.create_task(both.move(job))
    source.resume()
    assert (await moving).status_code == 202
    await both.finished(job)
    await until(lambda: both.source.failed)
    assert [(f.request_id, f.attempt, f.code) for f in both.source.failed] == [("a", 0, "moved")]
    assert all(delta.attempt == 1 for delta in both.target.deltas)
    await both.settle()
    assert count(source, "moves", "moved") == count(source, "attempts", "moved") == 1
    assert count(source, "move_blocks") >= 11
    assert count(target, "step_tokens", "prefill") == 0, "tokens that were drawn while the blocks travelled"
    assert 0 < count(source, "move_pause") < 2


async def test_many_streams_leave_at_once(both: Both) -> None:
    jobs = [make_job(f"r{i}", prompt(i), MOST) for i in range(8)]
    await asyncio.gather(*(both.source.generate(job) for job in jobs))
    await until(lambda: len({delta.request_id for delta in both.source.deltas}) == 8)
    answers = await asyncio.gather(*(both.move(job) for job in jobs))
    assert [answer.text for answer in answers if answer.status_code != 202] == []
    for job in jobs:
        await both.finished(job)
    await both.settle()
    assert count(both.source.decode, "moves", "moved") == 8


async def test_a_stream_that_is_refused_runs_on_where_it_is_and_may_be_moved_later(both: Both) -> None:
    job = await both.streams("a")
    both.target.decode.loaded.draining = True
    moving = asyncio.create_task(both.move(job))
    both.source.decode.resume()
    assert (await moving).json()["error"]["code"] == "grant_refused"
    both.target.decode.loaded.draining = False
    assert (await both.move(job, 2)).status_code == 202
    await both.finished(job)
    await both.settle()
    assert count(both.source.decode, "moves", "stayed") == 1


@pytest.mark.parametrize("when", ["before the grant", "while it stands"])
async def test_a_client_that_leaves_while_its_stream_moves(both: Both, when: str) -> None:
    """The router cancels both attempts."""
    job = await both.streams("a")
    stands: threading.Event | None
    with both.target.decode.frozen_engine() if when == "before the grant" else both.frozen_once_it_stands() as stands:
        moving = asyncio.create_task(both.move(job))
        both.source.decode.resume()
        await (until(stands.is_set) if stands else asyncio.sleep(0.2))
        await both.source.cancel(job, both.source.decode)
        await both.source.cancel(replace(job, attempt=1), both.target.decode)
        await until(lambda: both.source.failed)
    assert (await moving).status_code == 503
    await both.settle()
    assert both.source.failed[0].code == "cancelled"
    assert both.tokens("a") == expected(prompt(1), MOST)[: len(both.tokens("a"))]


async def test_the_link_breaks_while_a_stream_stands_and_it_runs_on(both: Both) -> None:
    job = await both.streams("a")
    with both.frozen_once_it_stands() as stands:
        moving = asyncio.create_task(both.move(job))
        both.source.decode.resume()
        await until(stands.is_set)
    # The answer may be lost on its way: then both go on, and the router listens to one of them.
    await both.target.decode.lose_link()
    answer = await moving
    if answer.status_code != 202:
        await until(lambda: both.source.finished("a"))
        assert both.source.tokens("a") == expected(prompt(1), MOST)
    else:
        await both.finished(job)
    await both.source.decode.settle()


@pytest.mark.parametrize("who", ["the router waits", "the router has left"])
async def test_the_other_node_freezes_while_a_stream_stands_and_it_soon_runs_on(both: Both, who: str) -> None:
    """It stood for the silence limit of the link, or for as long as a ship may stall: 5 and 15 s."""
    job = await both.streams("a")
    with both.frozen_once_it_stands() as stands:
        moving = asyncio.create_task(both.move(job))
        both.source.decode.resume()
        await until(stands.is_set)
        stood_at, seen = time.monotonic(), len(both.source.deltas)
        if who == "the router has left":
            moving.cancel()
        await until(lambda: len(both.source.deltas) > seen + 2)
        assert time.monotonic() - stood_at < 2.5
        if who == "the router waits":
            assert (await moving).json()["error"]["code"] == "transfer_failed"
    await until(lambda: both.source.finished("a"))
    assert both.source.tokens("a") == expected(prompt(1), MOST)
    await both.settle()


async def test_a_stream_that_grows_too_long_for_the_other_node_meanwhile_is_no_client_s_fault(both: Both) -> None:
    """A 400 in the middle of a stream, for a pool that is smaller there."""
    job = await both.streams("a")
    moving = both.source.decode.engine.moving
    stand = moving.snapshot

    def late(transfer: int) -> Any:
        both.target.decode.engine._admission._longest = len(job.token_ids)
        return stand(transfer)

    moving.snapshot = late  # type: ignore[method-assign]
    asked = asyncio.create_task(both.move(job))
    both.source.decode.resume()
    await asked
    await until(lambda: both.target.failed)
    assert both.target.failed[0].code == "transfer_failed"
    await both.settle()


async def test_a_move_that_nobody_waits_for_any_more_is_not_begun(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for its turn while who asked for it went away."""
    migrations = both.source.decode.service._migrations
    monkeypatch.setattr(migrations, "_turns", asyncio.Semaphore(0))
    job = await both.streams("a")
    moving = asyncio.create_task(both.move(job))
    await until(migrations.busy)
    moving.cancel()
    await asyncio.sleep(0.2)
    migrations._turns.release()
    await until(lambda: not migrations.busy())
    both.source.decode.resume()
    await until(lambda: both.source.finished("a"))
    assert both.tokens("a") == both.source.tokens("a") == expected(prompt(1), MOST)
    await both.settle()


async def test_a_drain_waits_for_its_moves_and_leaves_nothing_behind(both: Both) -> None:
    """As a router that sees the node drain has it: the process may end when all streams are gone."""
    job = await both.streams("a")
    source = both.source.decode
    source.stop.requested.set()
    source.resume()
    assert (await both.move(job)).status_code == 202
    await asyncio.wait_for(asyncio.shield(source.run), 15)
    await both.finished(job)
    await both.target.decode.settle()


async def test_a_move_to_nowhere_is_answered(both: Both) -> None:
    job = await both.streams("a")
    nowhere = replace(both.target.decode.target, link_address="127.0.0.1:1")
    request = MoveRequest("a", 0, 1, nowhere)
    moving = asyncio.create_task(
        both.source._http.post(f"{both.source.decode.node.address.url}/attempts/move", content=pack(request))
    )
    both.source.decode.resume()
    assert (await moving).status_code == 503
    await until(lambda: both.source.finished("a"))
    assert both.source.tokens("a") == expected(prompt(1), MOST)
    assert job.attempt == 0
    await both.settle()


async def test_the_last_node_of_its_role_serves_until_another_is_ready() -> None:
    store = MemoryStore()
    async with worker("decode", make_engine(), store=store, node_id="a", respawned=False) as last:
        router = Router(None, last, "router")  # type: ignore[arg-type]
        await router.connect()
        last.stop.requested.set()
        await asyncio.sleep(1.2)
        assert not last.loaded.draining
        await router.generate(make_job("new", prompt()))
        await until(lambda: router.finished("new"))
        async with worker("prefill", make_engine(), store=store, node_id="p"):
            await asyncio.sleep(0.7)
            assert not last.loaded.draining, "a prefill node does not decode"
        async with worker("decode", make_engine(), store=store, node_id="b"):
            await asyncio.wait_for(asyncio.shield(last.run), 15)
        await router.close()


async def test_the_last_node_of_its_role_ends_when_its_grace_does() -> None:
    async with worker("decode", make_engine(), respawned=False, drain_timeout=1.0) as last:
        router = Router(None, last, "router")  # type: ignore[arg-type]
        await router.connect()
        last.stop.requested.set()
        await asyncio.sleep(0.5)
        assert not last.loaded.draining
        await asyncio.wait_for(asyncio.shield(last.run), 15)
        await router.close()


async def test_the_last_node_does_not_wait_when_no_router_is_there() -> None:
    async with worker("decode", make_engine(), respawned=False, drain_timeout=60.0) as last:
        last.stop.requested.set()
        await asyncio.wait_for(asyncio.shield(last.run), 10)
