"""Requests cancelled at every point leave no connection behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator

import httpx
import psutil
import pytest

from router.nodes.transport import SENDING, CancelSafeTransport


class Slow(httpx.AsyncBaseTransport):
    """Connects when `connected` is set, answers when `answered` is set; counts how it ended."""

    def __init__(self) -> None:
        self.connected, self.answered = asyncio.Event(), asyncio.Event()
        self.started, self.cancelled_while = False, ""
        self.body = Body()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.started = True
        doing = "connecting"
        try:
            await self.connected.wait()
            await request.extensions["trace"](f"http11.{SENDING}", {})
            doing = "waiting"
            await self.answered.wait()
        except asyncio.CancelledError:
            self.cancelled_while = doing
            raise
        return httpx.Response(200, stream=self.body)


class Body(httpx.AsyncByteStream):
    closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"x"

    async def aclose(self) -> None:
        self.closed = True


async def until_started(slow: Slow) -> tuple[asyncio.Task[httpx.Response], CancelSafeTransport]:
    safe = CancelSafeTransport(slow)
    task = asyncio.create_task(safe.handle_async_request(httpx.Request("GET", "http://node/")))
    while not slow.started:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return task, safe


async def test_a_connection_being_made_is_finished_before_the_cancel_reaches_it() -> None:
    slow = Slow()
    task, safe = await until_started(slow)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not slow.cancelled_while
    slow.connected.set()
    await safe.aclose()
    assert slow.cancelled_while == "waiting"


async def test_a_request_that_is_sent_is_cancelled_at_once() -> None:
    slow = Slow()
    slow.connected.set()
    task, safe = await until_started(slow)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await safe.aclose()
    assert slow.cancelled_while == "waiting"


async def test_an_answer_that_comes_too_late_is_closed() -> None:
    slow = Slow()
    task, safe = await until_started(slow)
    slow.connected.set()
    slow.answered.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await safe.aclose()
    assert not slow.cancelled_while
    assert slow.body.closed


async def test_cancelled_requests_leave_no_socket_open() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            while True:
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 0.3)
                await asyncio.sleep(random.uniform(0, 0.002))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    limits = httpx.Limits(max_connections=None, keepalive_expiry=0.1)
    safe = CancelSafeTransport(httpx.AsyncHTTPTransport(limits=limits))
    async with httpx.AsyncClient(transport=safe, base_url=f"http://127.0.0.1:{port}") as client:

        async def cut() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.uniform(0, 0.008)):
                    await client.get("/")

        for _ in range(40):
            await asyncio.gather(*(cut() for _ in range(20)))
        await asyncio.sleep(0.6)
        await client.get("/")
        connections = psutil.Process(os.getpid()).net_connections()
        assert len([c for c in connections if c.raddr and c.raddr.port == port]) <= 1
    server.close()
