"""Connections that linger, lie or stall are closed in time; those that behave are left alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from socket import SO_RCVBUF, SOL_SOCKET
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvferry.runtime.connection_limits import MAX_AHEAD, MAX_HEADER_BYTES, MAX_HEADERS, Limits
from kvferry.runtime.graceful_close import lingering
from kvferry.runtime.http import Server, bind
from kvferry.runtime.rejection import MAX_DRAINED_BYTES
from kvferry.runtime.rejection_throttle import MAX_DELAY_S, RejectionThrottle
from tests.waiting import until

HEAD = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
GET = b"GET /echo HTTP/1.1\r\nhost: x\r\n\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n"
FLOOD = b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n"


@dataclass
class Seen:
    """What the application behind the connections met."""

    left: int = 0
    open: int = 0
    sent: int = 0
    bodies: list[int] = field(default_factory=list)


@dataclass
class Served:
    port: int
    seen: Seen
    server: uvicorn.Server

    async def connect(self, data: bytes = b"") -> Socket:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return Socket(reader, writer)


@dataclass
class Socket:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def rest(self, limit_s: float = 5.0) -> bytes:
        """Everything until the server closes."""
        async with asyncio.timeout(limit_s):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read()
        return b""

    async def until(self, end: bytes, limit_s: float = 5.0) -> bytes:
        async with asyncio.timeout(limit_s):
            return await self.reader.readuntil(end)

    def close(self) -> None:
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def serving(
    keep_alive: int = 5, throttle: RejectionThrottle | None = None, **limits: Any
) -> AsyncIterator[Served]:
    seen = Seen()

    async def echo(request: Request) -> Response:
        seen.open += 1
        try:
            seen.bodies.append(len(await request.body()))
        except ClientDisconnect:
            seen.left += 1
            raise
        finally:
            seen.open -= 1
        return Response("done")

    def flowing(piece: bytes, pause_s: float, count: int) -> Any:
        async def app(request: Request) -> Response:
            async def body() -> AsyncIterator[bytes]:
                seen.open += 1
                try:
                    for _ in range(count):
                        await asyncio.sleep(pause_s)
                        yield piece
                        seen.sent += len(piece)
                finally:
                    seen.open -= 1

            return StreamingResponse(body())

        return app

    async def early(request: Request) -> Response:
        return Response("not read")

    routes = [
        Route("/echo", echo, methods=["GET", "POST"]),
        Route("/early", early, methods=["POST"]),
        Route("/stream", flowing(b"piece", 0.1, 12)),
        Route("/flood", flowing(b"x" * 2**20, 0, 1000)),
        Route("/trickle", flowing(b"x" * 2**12, 0, 10_000)),
    ]
    config = uvicorn.Config(
        Starlette(routes=routes), http=lingering(Limits(**limits), throttle or RejectionThrottle()), lifespan="off",
        log_config=None, access_log=False, timeout_keep_alive=keep_alive, timeout_graceful_shutdown=1,
    )  # fmt: skip
    with bind("127.0.0.1", 0) as sock:
        server = Server(config)
        task = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        try:
            yield Served(sock.getsockname()[1], seen, server)
        finally:
            server.should_exit = server.force_exit = True
            await asyncio.wait_for(task, 10)


def error_of(answer: bytes) -> tuple[int, str]:
    """Status and code of an answer that must be an OpenAI error object and announce the end of the connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head, answer
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"]


async def test_three_hundred_slow_sockets_are_closed_and_neighbours_do_not_notice() -> None:
    async with serving(header_s=0.6, body_s=0.6) as served:
        starts = (b"", b"POST /echo HTTP/1.1\r\nx-a: ", HEAD + b"part")
        began = time.monotonic()
        slow = [await served.connect(starts[number % 3]) for number in range(300)]

        async def drip(socket: Socket) -> None:
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    socket.writer.write(b"a")
                    await asyncio.sleep(0.1)

        drips = [asyncio.create_task(drip(socket)) for socket in slow[1::3]]
        waits = []
        ends = asyncio.gather(*(socket.rest() for socket in slow))
        while not ends.done():
            asked = time.monotonic()
            neighbour = await served.connect(GET)
            await neighbour.until(b"done")
            neighbour.close()
            waits.append(time.monotonic() - asked)
            await asyncio.sleep(0.02)
        answers = await ends
        took = time.monotonic() - began
        for task in drips:
            task.cancel()
        assert took < 15, took
        assert sorted(waits)[int(len(waits) * 0.95)] < 1, sorted(waits)[-5:]
        assert set(answers[0::3]) == {b""}
        told = [answer for answer in answers if answer]
        assert len(told) > 100, "those whose last byte crossed the answer may miss it"
        assert {error_of(answer) for answer in told} == {(408, "request_timeout")}
        await until(lambda: served.seen.open == 0)
        assert served.seen.left == 100


async def test_an_upload_that_is_slow_but_comes_survives() -> None:
    async with serving(header_s=0.3, body_s=0.5) as served:
        socket = await served.connect(HEAD)
        for _ in range(10):
            await asyncio.sleep(0.15)
            socket.writer.write(b"0123456789")
        assert b"200 OK" in await socket.until(b"done")
        assert served.seen.bodies == [100]


async def test_a_body_that_drips_for_ever_ends_with_the_request_timeout() -> None:
    async with serving(body_s=0.5, request_s=0.8) as served:
        socket = await served.connect(HEAD)
        for _ in range(8):
            socket.writer.write(b"0")
            await asyncio.sleep(0.1)
        assert error_of(await socket.rest(1)) == (408, "request_timeout")


async def test_no_deadline_cuts_an_answer_under_way() -> None:
    async with serving(header_s=0.2, body_s=0.2, keep_alive=1) as served:
        plain = await served.connect(STREAM)
        assert (await plain.until(b"\r\n0\r\n\r\n")).count(b"piece") == 12
        ahead = await served.connect(STREAM + GET[:20])
        assert (await ahead.until(b"\r\n0\r\n\r\n")).count(b"piece") == 12
        assert error_of(await ahead.rest()) == (408, "request_timeout")


async def test_an_idle_connection_lives_as_long_as_keep_alive_says() -> None:
    async with serving(header_s=0.2, keep_alive=1) as served:
        socket = await served.connect(GET)
        await socket.until(b"done")
        await asyncio.sleep(0.6)
        socket.writer.write(GET[:10])
        await asyncio.sleep(0.1)
        socket.writer.write(GET[10:])
        await socket.until(b"done")
        began = time.monotonic()
        assert await socket.rest() == b""
        assert 0.8 < time.monotonic() - began < 2


async def test_a_connection_whose_answer_came_before_its_body_ended_is_closed_as_any_idle_one() -> None:
    async with serving(keep_alive=1, body_s=5.0) as served:
        client = await served.connect(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n1")
        await client.until(b"not read")
        client.writer.write(b"2")
        began = time.monotonic()
        assert await client.rest(4.0) == b""
        assert 0.5 < time.monotonic() - began < 3.0


async def test_one_address_has_so_many_connections_and_no_more() -> None:
    async with serving(per_address=3) as served:
        held = [await served.connect() for _ in range(3)]
        await until(lambda: len(served.server.server_state.connections) == 3)
        assert error_of(await (await served.connect()).rest()) == (429, "overloaded")
        held.pop().close()
        await until(lambda: len(served.server.server_state.connections) == 2)
        assert b"200 OK" in await (await served.connect(GET)).until(b"done")


async def test_headers_and_what_surrounds_a_body_are_bounded() -> None:
    async with serving(body_bytes=1000) as served:
        long = await served.connect(b"GET /echo HTTP/1.1\r\nx-long: ")
        long.writer.write(b"y" * MAX_HEADER_BYTES)
        assert error_of(await long.rest()) == (431, "header_too_long")
        chunked = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        trailers = await served.connect(chunked + b"1\r\nx\r\n0\r\n")
        with contextlib.suppress(ConnectionError):
            for number in range(200):
                trailers.writer.write(b"t%d: %b\r\n" % (number, b"z" * 1000))
                await trailers.writer.drain()
        await trailers.rest()
        await until(lambda: not served.server.server_state.connections)
        assert not served.seen.open


async def test_connections_beyond_the_total_are_rejected_and_leave_their_place() -> None:
    async with serving(connections=2) as served:
        kept = [await served.connect() for _ in range(2)]
        await until(lambda: len(served.server.server_state.connections) == 2)
        assert error_of(await (await served.connect(GET)).rest())[0] == 429
        kept[0].close()
        await until(lambda: len(served.server.server_state.connections) == 1)
        assert b"200 OK" in await (await served.connect(GET)).until(b"done")


@pytest.mark.parametrize("throttle", [None, RejectionThrottle()])
@pytest.mark.parametrize("announced", [True, False])
async def test_a_client_that_sends_all_before_it_reads_gets_the_rejection(
    announced: bool, throttle: RejectionThrottle | None
) -> None:
    """It is rejected at the first bytes, or while it sends; a reset would take the response from it."""
    async with serving(throttle=throttle, body_bytes=1000) as served:
        size = 20 * 2**20
        head = b"content-length: %d" % size if announced else b"transfer-encoding: chunked"
        client = await served.connect(b"POST /echo HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n")
        if not announced:
            client.writer.write(b"%x\r\n" % size)
        async with asyncio.timeout(20):
            for _ in range(size >> 16):
                client.writer.write(bytes(1 << 16))
                await client.writer.drain()
        assert error_of(await client.reader.read()) == (413, "request_too_large")
        client.close()
        await until(lambda: not served.server.server_state.connections)


async def test_no_more_of_a_rejected_request_is_read_than_its_limit() -> None:
    async with serving(body_bytes=1000) as served:
        client = await served.connect(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999\r\n\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(20):
                while sent < 4 * MAX_DRAINED_BYTES:
                    client.writer.write(bytes(1 << 20))
                    await client.writer.drain()
                    sent += 1 << 20
        assert sent < 2 * MAX_DRAINED_BYTES
        await until(lambda: not served.server.server_state.connections)


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02\x00", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 99])
async def test_what_is_no_http_gets_an_error_object(garbage: bytes) -> None:
    async with serving() as served:
        assert error_of(await (await served.connect(garbage)).rest())[0] == 400


async def test_garbage_behind_a_request_ends_its_answer_and_tells_the_application() -> None:
    async with serving() as served:
        socket = await served.connect(STREAM)
        await socket.until(b"piece")
        socket.writer.write(b"\0\0\0")
        assert b"error" not in await socket.rest()
        await until(lambda: served.seen.open == 0, 0.5)


UPGRADE = b" /echo HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: h2c\r\n"


@pytest.mark.parametrize(
    ("asks", "length"),
    [
        (b"GET" + UPGRADE + b"\r\n", 0),
        (b"POST" + UPGRADE + b"content-length: 5\r\n\r\nhello", 5),
        (b"POST" + UPGRADE + b"content-length: 0\r\n\r\n", 0),
        (b"POST" + UPGRADE + b"content-length: 00\r\n\r\n", 0),
        (b"POST" + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n", 7),
    ],
)
@pytest.mark.parametrize("cut", [1, 10_000])
async def test_an_upgrade_that_is_not_offered_is_a_plain_request(asks: bytes, length: int, cut: int) -> None:
    """Java's client asks for h2c with its first request, whose body had been lost."""
    async with serving() as served:
        socket = await served.connect()
        for start in range(0, len(asks), cut):
            socket.writer.write(asks[start : start + cut])
            await asyncio.sleep(0.001)
        answer = await socket.rest()
        assert answer.endswith(b"done")
        assert b"connection: close" in answer
        assert served.seen.bodies == [length]


async def test_what_follows_the_body_behind_an_upgrade_is_not_read() -> None:
    async with serving() as served:
        ahead = b"POST" + UPGRADE + b"content-length: 5\r\n\r\nhello" + HEAD + b"x" * 100
        assert (await (await served.connect(ahead)).rest()).count(b"200 OK") == 1
        assert served.seen.bodies == [5]


async def test_a_body_behind_an_upgrade_has_its_deadline_and_its_form() -> None:
    async with serving(body_s=0.3) as served:
        begun = b"POST" + UPGRADE + b"content-length: 5\r\n\r\nhe"
        assert error_of(await (await served.connect(begun)).rest()) == (408, "request_timeout")
        broken = b"POST" + UPGRADE + b"transfer-encoding: chunked\r\n\r\nzz\r\n"
        assert error_of(await (await served.connect(broken)).rest())[0] == 400


async def test_requests_sent_ahead_are_answered_in_turn_and_leaving_ends_the_first() -> None:
    async with serving() as served:
        socket = await served.connect(GET + GET)
        await socket.until(b"done")
        await socket.until(b"done")
        socket.writer.write(STREAM + GET)
        await socket.until(b"piece")
        socket.close()
        await until(lambda: served.seen.open == 0, 0.6)


async def test_a_reader_that_takes_nothing_is_let_go() -> None:
    async with serving(reader_s=0.5) as served:
        socket = await served.connect(FLOOD)
        await until(lambda: served.seen.open == 1)
        await until(lambda: served.seen.open == 0, 3)
        socket.close()


async def test_a_reader_that_takes_too_little_is_let_go_and_a_slow_one_is_not() -> None:
    async with serving(reader_s=0.3, min_rate=200_000) as served:
        taking = await served.connect(FLOOD)
        taking.reader._transport.pause_reading()  # type: ignore[attr-defined]

        async def take(per_s: int, socket: Socket) -> None:
            raw = socket.writer.get_extra_info("socket")
            with contextlib.suppress(ConnectionError):
                while True:
                    with contextlib.suppress(BlockingIOError):
                        raw._sock.recv(per_s // 20)
                    await asyncio.sleep(0.05)

        little = asyncio.create_task(take(20_000, taking))
        await until(lambda: served.seen.open == 1)
        await until(lambda: served.seen.open == 0, 5)
        little.cancel()
        taking.close()
        quick = await served.connect(FLOOD)
        quick.reader._transport.pause_reading()  # type: ignore[attr-defined]
        enough = asyncio.create_task(take(20_000_000, quick))
        await until(lambda: served.seen.open == 1)
        await asyncio.sleep(1.5)
        assert served.seen.open == 1
        enough.cancel()
        quick.close()


async def test_what_nobody_takes_is_little() -> None:
    """The kernel's buffers grow to megabytes by themselves: a stream that fits would never be found unread."""
    async with serving(reader_s=30) as served:
        socket = await served.connect(b"GET /trickle HTTP/1.1\r\nhost: x\r\n\r\n")
        own = socket.writer.get_extra_info("socket")
        own._sock.setsockopt(SOL_SOCKET, SO_RCVBUF, 4096)
        socket.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: served.seen.sent > 0)
        last = -1
        while served.seen.sent != last:
            last = served.seen.sent
            await asyncio.sleep(0.3)
        assert last < 2**20, last
        socket.close()


async def test_a_body_below_the_least_rate_is_refused_and_one_above_it_is_read() -> None:
    async with serving(body_s=0.3, min_rate=30) as served:
        slow, quick = await served.connect(HEAD), await served.connect(HEAD)
        for _ in range(10):
            slow.writer.write(b"0")
            quick.writer.write(b"0123456789")
            await asyncio.sleep(0.1)
        answer = await slow.rest(1)
        assert not answer or error_of(answer) == (408, "request_timeout"), "a byte that crossed the answer resets it"
        assert b"200 OK" in await quick.until(b"done")
        assert (served.seen.left, served.seen.bodies) == (1, [100])


async def test_headers_are_counted() -> None:
    async with serving() as served:
        many = b"".join(b"x-%d: 1\r\n" % number for number in range(MAX_HEADERS))
        assert b"200 OK" in await (await served.connect(GET[:-2] + many[: many.rindex(b"x-")] + b"\r\n")).until(b"done")
        assert error_of(await (await served.connect(GET[:-2] + many + b"\r\n")).rest()) == (431, "header_too_long")


class Till(RejectionThrottle):
    """It notes what refusals took."""

    def __init__(self) -> None:
        super().__init__()
        self.took: list[float] = []

    def delay_s(self, source: str, took_s: float) -> float:
        self.took.append(took_s)
        return super().delay_s(source, took_s)


def test_a_refusal_counts_as_long_as_it_took_on_the_loop_that_routers_run_on() -> None:
    """uvloop's clock stands still while a callback runs."""

    async def scenario() -> list[float]:
        till = Till()
        async with serving(throttle=till) as served:
            for _ in range(5):
                await (await served.connect(GET * MAX_AHEAD + b"\0")).rest()
        return till.took

    took = uvloop.run(scenario())
    assert len(took) == 5
    assert min(took) > 0.0001, took


async def test_requests_far_ahead_of_their_answers_end_the_connection_and_are_not_answered() -> None:
    till = Till()
    async with serving(throttle=till) as served:
        some = await served.connect(GET * (MAX_AHEAD + 1))
        for _ in range(MAX_AHEAD + 1):
            await some.until(b"done")
        many = await served.connect(GET * 1000)
        await many.rest()
        assert len(till.took) == 1
        assert len(served.seen.bodies) <= MAX_AHEAD + 2


async def test_what_was_sent_ahead_of_garbage_is_not_answered_while_its_refusal_waits() -> None:
    throttle = RejectionThrottle()
    async with serving(throttle=throttle) as served:
        throttle.served()
        while throttle.delay_s("127.0.0.1", 0.01) < 1:
            pass
        client = await served.connect(GET * 50 + b"\0")
        await client.rest(MAX_DELAY_S + 5)
        assert len(served.seen.bodies) <= 1


async def test_what_is_no_request_is_told_so_later_where_its_address_has_sent_too_much_of_it() -> None:
    throttle = RejectionThrottle()
    async with serving(throttle=throttle) as served:
        assert error_of(await (await served.connect(b"\0" * 9)).rest())[0] == 400
        throttle.served()
        while throttle.delay_s("127.0.0.1", 0.01) < 1:
            pass
        wrong = await served.connect(b"\0" * 9)
        neighbour = await served.connect(GET)
        await neighbour.until(b"done")
        with pytest.raises(TimeoutError):
            await wrong.until(b"\r\n\r\n", 0.3)
        assert error_of(await wrong.rest(MAX_DELAY_S + 5))[0] == 400
        going_on = await served.connect(b"\0" * 9)
        await asyncio.sleep(0.1)
        going_on.writer.write(GET)
        await going_on.rest(MAX_DELAY_S + 5)
        assert served.seen.bodies == [0]
        left = await served.connect(b"\0" * 9)
        left.close()
        neighbour.close()
        await until(lambda: not served.server.server_state.connections)
