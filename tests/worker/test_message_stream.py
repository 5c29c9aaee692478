"""A streamed response is closed exactly once, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvferry.protocol.messages import CancelRequest
from kvferry.protocol.wire import FrameReader, pack
from kvferry.worker.message_stream import MessageStreamResponse


class Connection:
    """The two ends of an ASGI connection."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(dict(message))


async def two() -> AsyncIterator[bytes]:
    yield pack(CancelRequest("a", 0))
    yield pack(CancelRequest("b", 1))


async def endless() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield pack(CancelRequest("never", 0))


async def test_messages_arrive_packed_and_the_end_closes() -> None:
    connection, closed = Connection(), []
    await MessageStreamResponse(two(), lambda: closed.append(1))({}, connection.receive, connection.send)
    body = b"".join(m.get("body", b"") for m in connection.sent)
    assert list(FrameReader().feed(body)) == [CancelRequest("a", 0), CancelRequest("b", 1)]
    assert closed == [1]
    assert b"content-length" not in dict(connection.sent[0]["headers"])


async def test_a_message_that_cannot_be_packed_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def unpackable() -> AsyncIterator[bytes]:
        yield pack(object())

    connection, closed = Connection(), []
    await MessageStreamResponse(unpackable(), lambda: closed.append(1))({}, connection.receive, connection.send)
    assert closed == [1]
    assert [record.message for record in caplog.records] == ["a stream ended with an error"]


async def test_a_reader_that_leaves_before_the_first_message_is_noticed() -> None:
    connection, closed = Connection(), []
    task = asyncio.create_task(
        MessageStreamResponse(endless(), lambda: closed.append(1))({}, connection.receive, connection.send)
    )
    await asyncio.sleep(0.01)
    connection.gone.set()
    await asyncio.wait_for(task, 1)
    assert closed == [1]


async def test_a_cancelled_server_task_closes_too() -> None:
    connection, closed = Connection(), []
    task = asyncio.create_task(
        MessageStreamResponse(endless(), lambda: closed.append(1))({}, connection.receive, connection.send)
    )
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert closed == [1]
