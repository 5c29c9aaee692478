"""Waiting for a client to go away."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from kvferry.protocol.errors import Cancelled, KvferryError
from kvferry.runtime.disconnect import disconnected, until_disconnect


class Client:
    """Stays until `gone` is set."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_only_a_disconnect_ends_the_wait() -> None:
    told: list[Any] = [{"type": "http.request", "more_body": False}, {"type": "http.disconnect"}, {"type": "never"}]

    async def receive() -> Any:
        return told.pop(0)

    await disconnected(receive)
    assert told == [{"type": "never"}]


async def test_a_client_that_stays_has_the_result_or_the_error_of_the_work() -> None:
    client, others = Client(), asyncio.all_tasks()

    async def fails() -> None:
        raise KvferryError("x")

    assert await until_disconnect(client.receive, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(KvferryError, match="x"):
        await until_disconnect(client.receive, fails())
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == others


async def test_work_is_cancelled_when_its_client_leaves() -> None:
    client, cancelled = Client(), list[bool]()

    async def work() -> None:
        try:
            client.gone.set()
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    with pytest.raises(Cancelled):
        await until_disconnect(client.receive, work())
    assert cancelled
    await asyncio.sleep(0)  # and nothing more is cancelled
    task = asyncio.current_task()
    assert task
    assert not task.cancelling()


async def test_work_that_swallows_a_cancellation_is_cancelled_again() -> None:
    client, swallowed = Client(), list[bool]()

    async def work() -> None:
        client.gone.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        swallowed.append(True)
        await asyncio.Event().wait()

    async with asyncio.timeout(5):
        with pytest.raises(Cancelled):
            await until_disconnect(client.receive, work())
    assert swallowed


async def test_what_ends_although_its_client_left_is_cancelled_all_the_same() -> None:
    client = Client()

    async def work() -> str:
        client.gone.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "for nobody"

    with pytest.raises(Cancelled):
        await until_disconnect(client.receive, work())


async def test_a_client_that_leaves_as_the_work_ends_cancels_nothing_that_follows() -> None:
    left = asyncio.get_running_loop().create_future()

    async def receive() -> Any:
        return await left

    async def work() -> str:
        await asyncio.sleep(0)
        left.set_result({"type": "http.disconnect"})
        await asyncio.sleep(0)  # the one that looks for the client has heard of it, and its callback is due
        return "done"

    assert await until_disconnect(receive, work()) == "done"
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_task_that_others_cancel_is_cancelled_and_not_called_gone() -> None:
    client = Client()
    task = asyncio.create_task(until_disconnect(client.receive, asyncio.Event().wait()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    client.gone.set()
