"""Cancelled in every phase and every way, a dispatch leaves nothing behind, here and on the nodes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvferry.protocol.errors import Cancelled
from kvferry.protocol.messages import PrefillRequest
from kvferry.router.dispatch.dispatch import RequestDispatch
from kvferry.router.dispatch.interface import Output, OutputComplete
from tests.crowded import in_time
from tests.fake_workers import PROMPT, SILENCE, Bench, FakeWorker, collect, decode, expected, first_token, ids, prefill
from tests.waiting import until


async def hang(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
    yield SILENCE


async def hang_after_first(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
    yield first_token(request.job)
    yield SILENCE


async def by_call(dispatch: RequestDispatch, task: asyncio.Task[Any]) -> None:
    await dispatch.cancel()
    with pytest.raises(Cancelled):
        await task


async def by_task(dispatch: RequestDispatch, task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


WAYS = [by_call, by_task]


@pytest.mark.parametrize("way", WAYS)
async def test_during_the_lookup(way: Any) -> None:
    class Slow:
        asked = False

        async def longest_prefix(self, hashes: Any, nodes: Any) -> dict[str, int]:
            self.asked = True
            await asyncio.sleep(30)
            return {}

        async def holders(self, rows: Any, nodes: Any) -> list[frozenset[str]]:
            raise AssertionError("of no model with recurrent layers")

    async with Bench([prefill(), decode()]) as bench:
        bench.cluster._prefixes._lookup = index = Slow()
        dispatch = bench.start(8)
        task = asyncio.create_task(collect(dispatch))
        await until(lambda: index.asked)
        await way(dispatch, task)
        await asyncio.sleep(0.1)
        assert bench["p1"].prefills == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("script", [hang, hang_after_first])
async def test_while_prefill_works(way: Any, script: Any) -> None:
    async with Bench([prefill(prefill_script=script), decode()]) as bench:
        dispatch = bench.start(8)
        task = asyncio.create_task(collect(dispatch))
        await until(lambda: len(bench["p1"].prefills) == 1)
        await asyncio.sleep(0.03)
        began = time.monotonic()
        await way(dispatch, task)
        await until(lambda: len(bench["p1"].cancels) == len(bench["d1"].cancels) == 1)
        await until(lambda: bench["p1"].answering == 0)
        assert in_time(time.monotonic() - began, 0.5)
        assert bench["p1"].cancels[0].request_id == bench["p1"].prefills[0].job.request_id


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("with_prefill", [True, False])
async def test_while_tokens_flow(way: Any, with_prefill: bool) -> None:
    async with Bench([decode()] + [prefill()] * with_prefill) as bench:
        dispatch = bench.start(10_000)
        task = asyncio.create_task(collect(dispatch))
        await until(lambda: dispatch.route is not None and bench["d1"].running == 1)
        await asyncio.sleep(0.05)
        began = time.monotonic()
        await way(dispatch, task)
        await until(lambda: bench["d1"].running == 0)
        assert in_time(time.monotonic() - began, 0.5)
        if with_prefill:
            assert bench["p1"].cancels == []


async def test_while_the_attempt_is_being_sent() -> None:
    """Cancelled in the same tick in which the attempt was launched, before its call ran."""
    async with Bench([prefill(), decode()]) as bench:
        dispatch = bench.start(50)
        task = asyncio.create_task(collect(dispatch))
        while not dispatch._hedged.runners:  # noqa: ASYNC110
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await until(lambda: len(bench["d1"].cancels) == 1)
        await until(lambda: bench["d1"].running == 0)


async def test_while_waiting_for_a_node() -> None:
    async with Bench([decode(crash_after=2)], max_wait_s=30) as bench:
        dispatch = bench.start(50)
        task = asyncio.create_task(collect(dispatch))
        await until(lambda: dispatch._planner.backoff.waiting)
        began = time.monotonic()
        await by_call(dispatch, task)
        assert in_time(time.monotonic() - began, 0.5)


async def test_leaving_the_loop_ends_the_dispatch() -> None:
    async with Bench([prefill(), decode()]) as bench:
        outputs = []
        async for output in bench.start(10_000):
            outputs.append(output)
            if len(outputs) == 5:
                break
        assert ids(outputs) == expected(PROMPT, 5)
        await until(lambda: bench["d1"].running == 0)
        assert len(bench["d1"].cancels) == 1


async def test_a_listener_that_has_enough_ends_the_dispatch_well() -> None:
    async with Bench([prefill(), decode()]) as bench:
        dispatch, outputs = bench.start(10_000), list[Output]()

        def hear(output: Output) -> None:
            if len(outputs) >= 4:
                raise OutputComplete
            outputs.append(output)

        dispatch.listen(hear)
        async for output in dispatch:
            outputs.append(output)
        assert 4 <= len(outputs) < 1000
        assert ids(outputs) == expected(PROMPT, len(outputs))
        assert not bench.cluster.request_log.running
        assert [record.outcome for record in bench.cluster.request_log.recent] == ["done"]
        await until(lambda: bench["d1"].running == 0)
        assert len(bench["d1"].cancels) == 1


async def test_cancel_before_after_and_twice() -> None:
    async with Bench([prefill(), decode()]) as bench:
        never = bench.start(5)
        await never.cancel()
        with pytest.raises(Cancelled):
            await collect(never)
        ended = bench.start(5)
        await collect(ended)
        await ended.cancel()
        twice = bench.start(10_000)
        async for _ in twice:
            break
        await twice.cancel()
        await twice.cancel()
        await until(lambda: len(bench["d1"].cancels) == 1)
        assert bench["p1"].cancels == []


async def test_no_output_follows_a_cancel() -> None:
    async with Bench([decode()]) as bench:
        dispatch = bench.start(10_000)
        outputs = aiter(dispatch)
        await anext(outputs)
        await asyncio.sleep(0.05)
        await dispatch.cancel()
        with pytest.raises(Cancelled):
            await anext(outputs)


async def test_dispatches_never_iterated_hold_nothing() -> None:
    async with Bench([prefill(), decode()]) as bench:
        kept = [bench.start(5) for _ in range(10)]
        assert bench.balanced()
        assert all(dispatch.route is None for dispatch in kept)
