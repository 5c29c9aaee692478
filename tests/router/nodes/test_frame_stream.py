"""The reading end of a token stream against real sockets: frames, refusals, silence, and everything that breaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httptools
import httpx
import pytest
import uvloop
from fake_workers import lease_of

from protocol.errors import Draining, NodeLost
from protocol.messages import NodeLease, StepFrame, TokenDelta
from protocol.wire import WireError, pack
from router.nodes.client import NodeClient
from router.nodes.frame_stream import read_frames

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def frame(*ids: str) -> StepFrame:
    return StepFrame(tuple(TokenDelta(each, 0, 0, (5,)) for each in ids))


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that reads one request and leaves the rest to `answer`; its URL and the heads it was asked with."""
    heads: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        await answer(writer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/streams/router", heads
    finally:
        server.close()


class Heard:
    def __init__(self) -> None:
        self.opened = 0
        self.frames: list[StepFrame] = []

    def open(self) -> None:
        self.opened += 1

    async def read(self, url: str, silence_s: float = 5.0) -> None:
        await read_frames(url, connect_s=2.0, silence_s=silence_s, opened=self.open, deliver=self.frames.append)


async def test_frames_arrive_whole_however_their_bytes_are_cut() -> None:
    data = HEAD + chunk(pack(frame("a"))) + chunk(pack(StepFrame())) + chunk(pack(frame("b", "c")) * 2) + chunk(b"")

    async def answer(writer: asyncio.StreamWriter) -> None:
        for at in range(len(data)):
            writer.write(data[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0)

    heard = Heard()
    async with serving(answer) as (url, heads):
        await heard.read(url)
    assert heads[0].startswith(b"GET /streams/router HTTP/1.1\r\nhost: 127.0.0.1:")
    assert heard.opened == 1
    assert heard.frames == [frame("a"), StepFrame(), frame("b", "c"), frame("b", "c")]


def test_the_event_loop_of_the_router_reads_them_too() -> None:
    """uvloop's transports are not asyncio's by class."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(pack(frame("a"))) + chunk(b""))

    async def read() -> list[StepFrame]:
        heard = Heard()
        async with serving(answer) as (url, _):
            await heard.read(url)
        return heard.frames

    assert uvloop.run(read()) == [frame("a")]


async def test_a_refusal_is_the_nodes_own_error() -> None:
    body = httpx.Response(503, json=Draining("d1 is draining").body()).content

    async def answer(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2.5\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    heard = Heard()
    async with serving(answer) as (url, _):
        with pytest.raises(Draining, match="d1 is draining") as caught:
            await heard.read(url)
    assert caught.value.retry_after == 2.5
    assert not heard.opened


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (HEAD + chunk(pack(frame("a")))[:-9], ConnectionResetError),
        (b"", ConnectionResetError),
        (b"SSH-2.0-OpenSSH_9.2\r\n", httptools.HttpParserError),
        (HEAD + chunk(b"\xc1"), WireError),
        (HEAD + chunk(pack([1, 2])), WireError),
    ],
)
async def test_a_broken_answer_raises(data: bytes, error: type[Exception]) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    async with serving(answer) as (url, _):
        with pytest.raises(error):
            await Heard().read(url)


async def test_silence_is_noticed_and_heartbeats_are_not_silence() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for _ in range(5):
            writer.write(chunk(pack(StepFrame())))
            await asyncio.sleep(0.15)
        await asyncio.sleep(5)

    heard, loop = Heard(), asyncio.get_running_loop()
    async with serving(answer) as (url, _):
        began = loop.time()
        with pytest.raises(TimeoutError, match=r"silent for 0\.4 s"):
            await heard.read(url, silence_s=0.4)
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
    async with serving(answer) as (url, _):
        task = asyncio.create_task(heard.read(url))
        while not heard.opened:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(closed.wait(), 5)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[::1", "http://127.0.0.1:x"])
async def test_the_client_calls_an_unreachable_node_lost(url: str) -> None:
    client = NodeClient("router")
    node: NodeLease = lease_of("d1", "decode", http_url=url)
    with pytest.raises(NodeLost, match="d1: "):
        await client.stream(node, lambda: None, lambda frame: None)
    await client.aclose()


async def test_the_client_says_when_a_node_closed_the_stream() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(b""))

    client = NodeClient("router")
    async with serving(answer) as (url, _):
        with pytest.raises(NodeLost, match="closed the token stream"):
            await client.stream(lease_of("d1", "decode", http_url=url.removesuffix("/streams/router")), *[_ignore] * 2)
    await client.aclose()


def _ignore(*_: object) -> None:
    pass
