"""Calls to nodes against real sockets: frames, refusals, silence, everything that breaks, connections left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest
import uvloop

from kvferry.protocol.errors import Draining, KvferryError, NodeLost, Overloaded
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import CancelRequest, Job, PrefillRequest, StepFrame, TokenDelta
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.wire import pack
from kvferry.protocol.work import Generate
from kvferry.router.nodes.client import MAX_IDLE, NodeClient
from kvferry.runtime.http_connection import Connection
from tests.fake_workers import Bench, decode, first_token, lease_of, prefill
from tests.waiting import until

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EMPTY = b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n"
JOB = Job("r1", 0, (1, 2, 3), 3, Generate(SamplingParams()), "router")
CANCEL = CancelRequest("r1", 0)
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def frame(*ids: str) -> StepFrame:
    return StepFrame(tuple(TokenDelta(each, 0, 0, (5,)) for each in ids))


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[NodeLease, list[bytes]]]:
    """A node that reads a request's head and leaves the rest to `answer`; its lease and the heads it was asked with."""
    heads: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            await answer(writer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield lease_of("d1", "decode", http_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), heads
    finally:
        server.close()


class Heard:
    def __init__(self) -> None:
        self.opened = 0
        self.frames: list[StepFrame] = []

    def open(self) -> None:
        self.opened += 1

    async def read(self, node: NodeLease, silence_s: float = 5.0) -> None:
        await NodeClient("router", silence_s=silence_s).stream(node, None, self.open, self.frames.append)


def connections_to(node: NodeLease) -> int:
    port = int(node.http_url.rsplit(":", 1)[1])
    return sum(bool(c.raddr) and c.raddr.port == port for c in psutil.Process(os.getpid()).net_connections())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_an_exchange_on_a_connection_that_was_just_lost_is_a_connection_error(run: Callable[[Any], None]) -> None:
    """A write to a closed transport would raise RuntimeError (uvloop) or ValueError (some versions of asyncio)."""

    async def lost() -> None:
        async def answer(writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(60)

        async with serving(answer) as (node, _):
            loop, port = asyncio.get_running_loop(), int(node.http_url.rsplit(":", 1)[1])
            made = lambda: NodeClient("router")._connection()  # noqa: E731
            transport, connection = await loop.create_connection(made, "127.0.0.1", port)
            transport.abort()
            await asyncio.sleep(0.05)
            with pytest.raises(ConnectionResetError):
                await connection.exchange((b"GET / HTTP/1.1\r\n\r\n",), 1.0, None, None)

    run(lost())


async def test_frames_arrive_whole_however_their_bytes_are_cut() -> None:
    data = HEAD + chunk(pack(frame("a"))) + chunk(pack(StepFrame())) + chunk(pack(frame("b", "c")) * 2) + chunk(b"")

    async def answer(writer: asyncio.StreamWriter) -> None:
        for at in range(len(data)):
            writer.write(data[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0)

    heard = Heard()
    async with serving(answer) as (node, heads):
        with pytest.raises(NodeLost, match="d1 closed the token stream"):
            await heard.read(node)
    assert heads[0].startswith(b"GET /streams/router?epoch=1 HTTP/1.1\r\nhost: 127.0.0.1:")
    assert heard.opened == 1
    assert heard.frames == [frame("a"), StepFrame(), frame("b", "c"), frame("b", "c")]


def test_the_event_loop_of_the_router_reads_them_too() -> None:
    """uvloop's transports are not asyncio's by class."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(pack(frame("a"))) + chunk(b""))

    async def read() -> list[StepFrame]:
        heard = Heard()
        async with serving(answer) as (node, _):
            with pytest.raises(NodeLost):
                await heard.read(node)
        return heard.frames

    assert uvloop.run(read()) == [frame("a")]


async def test_a_refusal_is_the_nodes_own_error() -> None:
    body = httpx.Response(503, json=Draining("d1 is draining").body()).content

    async def answer(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2.5\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    heard = Heard()
    async with serving(answer) as (node, _):
        with pytest.raises(Draining, match="d1 is draining") as caught:
            await heard.read(node)
    assert caught.value.retry_after == 2.5
    assert not heard.opened


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (HEAD + chunk(pack(frame("a")))[:-9], NodeLost),
        (b"", NodeLost),
        (b"SSH-2.0-OpenSSH_9.2\r\n", NodeLost),
        (HEAD + chunk(b"\xc1"), NodeLost),
        (HEAD + chunk(pack([1, 2])), NodeLost),
    ],
)
async def test_a_broken_answer_raises(data: bytes, error: type[Exception]) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    async with serving(answer) as (node, _):
        with pytest.raises(error):
            await Heard().read(node)


async def test_silence_is_noticed_and_heartbeats_are_not_silence() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for _ in range(5):
            writer.write(chunk(pack(StepFrame())))
            await asyncio.sleep(0.15)
        await asyncio.sleep(5)

    heard, loop = Heard(), asyncio.get_running_loop()
    async with serving(answer) as (node, _):
        began = loop.time()
        with pytest.raises(NodeLost, match=r"silent for 0\.4 s"):
            await heard.read(node, silence_s=0.4)
    assert len(heard.frames) == 5
    assert loop.time() - began < 4


async def test_a_cancelled_reader_closes_its_connection() -> None:
    closed = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(chunk(pack(StepFrame())))
                await writer.drain()
                await asyncio.sleep(0.01)
        closed.set()

    heard = Heard()
    async with serving(answer) as (node, _):
        task = asyncio.create_task(heard.read(node))
        while not heard.opened:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(closed.wait(), 5)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[::1", "http://127.0.0.1:x", "http://"])
async def test_an_unreachable_node_is_lost(url: str) -> None:
    node = lease_of("d1", "decode", http_url=url)
    with pytest.raises(NodeLost, match="d1: "):
        await NodeClient("router").stream(node, None, lambda: None, lambda frame: None)
    with pytest.raises(NodeLost, match="d1: "):
        await NodeClient("router").cancel(node, CANCEL)


@pytest.mark.parametrize("moment", ["connection_made", "data_received", "connection_lost"])
async def test_a_call_given_up_at_any_moment_leaves_no_error_unread(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode node restarts: its connection comes or breaks in the moment in which its stream is given up."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    step = getattr(Connection, moment)

    def given_up(self: Connection, *args: Any) -> None:
        step(self, *args)
        task.cancel()

    monkeypatch.setattr(Connection, moment, given_up)

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)

    async with serving(answer) as (node, _):
        task = asyncio.create_task(Heard().read(node, silence_s=0.1))
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.2)
        gc.collect()
        assert connections_to(node) == 0
    assert told == []


async def test_calls_share_a_connection_until_it_has_rested_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.runtime.http_connection.KEEPALIVE_S", 0.2)
    opened = [0]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened[0] += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r")[0]))
                writer.write(EMPTY)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    node = lease_of("d1", "decode", http_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    client = NodeClient("router")
    for _ in range(5):
        await client.cancel(node, CANCEL)
    assert opened == [1]
    time.sleep(0.3)  # noqa: ASYNC251 - a loop that is too busy for its timers
    await client.cancel(node, CANCEL)
    assert opened == [2]
    opened[0] = 1
    await asyncio.gather(*(client.cancel(node, CANCEL) for _ in range(MAX_IDLE + 20)))
    assert len(client._idle[("127.0.0.1", int(node.http_url.rsplit(":", 1)[1]))]) == MAX_IDLE
    await until(lambda: not client._idle)
    await client.cancel(node, CANCEL)
    assert opened == [MAX_IDLE + 21]
    await client.aclose()
    assert not client._idle
    server.close()


async def test_a_connection_that_the_node_closes_is_not_used_again() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(EMPTY)

    client = NodeClient("router")
    async with serving(answer) as (node, heads):
        for _ in range(3):
            await client.cancel(node, CANCEL)
            await until(lambda: not client._idle)
        assert len(heads) == 3


async def test_after_a_broken_connection_the_next_call_opens_one_of_its_own() -> None:
    """What broke one resting connection (a node's restart, a router between) broke the others: a cancel, which is sent
    twice at most, had been lost on two of them."""
    refused: set[asyncio.StreamWriter] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r")[0]))
                if writer in refused:
                    break
                await asyncio.sleep(0.02)
                refused.add(writer)
                writer.write(EMPTY)
        writer.transport.abort()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    node = lease_of("d1", "decode", http_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    client = NodeClient("router")
    await asyncio.gather(*(client.cancel(node, CANCEL) for _ in range(3)))
    with pytest.raises(NodeLost):
        await client.cancel(node, CANCEL)
    await client.cancel(node, CANCEL)
    await client.aclose()
    server.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_cancelled_calls_leave_no_socket_open(run: Callable[..., int]) -> None:
    """Cancelled while connecting, sending, waiting or reading."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(random.uniform(0, 0.002))
        writer.write(HEAD)
        await writer.drain()
        await asyncio.sleep(random.uniform(0, 0.002))
        writer.write(chunk(pack(StepFrame())) + chunk(b""))

    async def storm() -> int:
        client = NodeClient("router")
        async with serving(answer) as (node, _):

            async def cut() -> None:
                with contextlib.suppress(TimeoutError, NodeLost):
                    async with asyncio.timeout(random.uniform(0, 0.008)):
                        await client.prefill(node, PrefillRequest(JOB), lambda message: None)

            for _ in range(40):
                await asyncio.gather(*(cut() for _ in range(20)))
            await client.aclose()
            await asyncio.sleep(0.1)
            return connections_to(node)

    assert run(storm()) == 0


async def test_refusals_arrive_as_the_nodes_own_error() -> None:
    async def full(writer: asyncio.StreamWriter) -> None:
        body = httpx.Response(429, json=Overloaded("full").body()).content
        writer.write(b"HTTP/1.1 429 No\r\nretry-after: 2.5\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    async def incompatible(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 6\r\n\r\n<html>")

    client = NodeClient("router")
    async with serving(full) as (node, _):
        with pytest.raises(Overloaded, match="full") as caught:
            await client.prefill(node, PrefillRequest(JOB), lambda message: None)
        assert caught.value.retry_after == 2.5
    async with serving(incompatible) as (node, _):
        with pytest.raises(KvferryError, match="502"):
            await client.cancel(node, CANCEL)


async def test_prefill_answers_are_delivered_as_they_come() -> None:
    async with Bench([prefill(), decode()]) as bench:
        heard: list[Any] = []
        await bench.client.prefill(bench["p1"].lease, PrefillRequest(JOB), heard.append)
        assert heard[:1] == [first_token(JOB)]
