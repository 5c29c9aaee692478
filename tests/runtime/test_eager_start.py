"""Coroutines whose first step runs before a task exists."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from kvferry.router.dispatch.background_calls import BackgroundCalls
from kvferry.runtime.eager_start import start_eagerly


async def test_the_first_step_runs_at_once_and_the_rest_in_a_task() -> None:
    told, opened = list[str](), asyncio.get_running_loop().create_future()

    async def call() -> None:
        told.append("first")
        told.append(await opened)
        await asyncio.sleep(0)
        told.append("last")

    rest = start_eagerly(call())
    assert rest is not None
    assert inspect.iscoroutine(rest)  # tasks of Python 3.12 and later take nothing else
    assert told == ["first"]
    task = asyncio.create_task(rest)
    opened.set_result("second")
    await task
    assert told == ["first", "second", "last"]


async def test_what_ends_or_fails_in_its_first_step_needs_no_task() -> None:
    async def ends() -> None:
        return

    async def fails() -> None:
        raise ValueError("x")

    assert start_eagerly(ends()) is None
    with pytest.raises(ValueError, match="x"):
        assert start_eagerly(fails()) is None


async def wait_until_cancelled(ended: list[bool]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(True)


@pytest.mark.parametrize("started", [True, False])
async def test_a_cancelled_call_ends_where_it_waits(started: bool) -> None:
    ended = list[bool]()
    task = BackgroundCalls().send_now(wait_until_cancelled(ended))
    await asyncio.sleep(0.01 if started else 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_a_call_that_is_cancelled_before_its_second_step_ends_too() -> None:
    ended, calls = list[bool](), BackgroundCalls()
    task = calls.send_now(wait_until_cancelled(ended))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    await asyncio.sleep(0)
    assert ended == [True]
    assert calls.open == 0


async def test_a_call_that_ended_at_once_is_open_until_the_next_turn() -> None:
    async def nothing() -> None:
        return

    calls = BackgroundCalls()
    await calls.send_now(nothing())
    await asyncio.sleep(0)
    assert calls.open == 0
