"""What a request may take on the wire, and what HTTP/1.0 is answered."""

from __future__ import annotations

import contextlib
import logging

import pytest

from kvferry.runtime.connection_limits import MAX_HEADER_BYTES, MAX_HEADERS
from kvferry.runtime.log import set_up_log
from tests.runtime.test_connections import GET, STREAM, Socket, error_of, serving

CHUNKED = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


async def sent(socket: Socket, piece: bytes, times: int) -> bytes:
    """The answer to these, or what is left of it where the server closed while they were sent."""
    with contextlib.suppress(ConnectionError):
        for _ in range(times):
            socket.writer.write(piece)
            await socket.writer.drain()
    return await socket.rest()


async def test_trailers_are_counted_and_are_no_headers() -> None:
    """Each had been kept and looked at: thirty megabytes of them stopped everybody for half a minute."""
    async with serving(body_bytes=2**24) as served:
        few = await served.connect(CHUNKED + b"1\r\nx\r\n0\r\n" + b"a: b\r\n" * MAX_HEADERS + b"\r\n")
        assert b"200 OK" in await few.until(b"done")
        many = await served.connect(CHUNKED + b"1\r\nx\r\n0\r\n" + b"a: b\r\n" * (2 * MAX_HEADERS))
        assert error_of(await many.rest()) == (431, "header_too_long")
        assert served.seen.bodies == [1]
        assert served.seen.left == 1


async def test_a_body_is_not_mostly_what_frames_it() -> None:
    async with serving(body_bytes=2**24) as served:
        tiny = await served.connect(CHUNKED)
        answer = await sent(tiny, b"1\r\nx\r\n" * 1000, 1000)
        assert not answer or error_of(answer) == (400, "invalid_request_error")
        assert served.seen.bodies == []
        some = await served.connect(CHUNKED + b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\n")
        assert b"200 OK" in await some.until(b"done")
        large = await served.connect(CHUNKED + b"40\r\n%b\r\n" % (b"x" * 64) * 10_000 + b"0\r\n\r\n")
        assert b"200 OK" in await large.until(b"done")
        assert served.seen.bodies == [10_000, 640_000]


@pytest.mark.parametrize("long", [b"GET /echo HTTP/1.1\r\nx: %b\r\n\r\n", b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_a_header_that_comes_at_once_has_the_same_bound(long: bytes) -> None:
    async with serving() as served:
        socket = await served.connect(long % (b"y" * MAX_HEADER_BYTES))
        assert error_of(await socket.rest()) == (431, "header_too_long")


async def test_http_1_0_is_answered_without_chunks() -> None:
    """It knows none: their lengths had stood among the text."""
    async with serving() as served:
        socket = await served.connect(STREAM.replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = (await socket.rest()).partition(b"\r\n\r\n")
        assert body == b"piece" * 12
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        told = await served.connect(GET.replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = await told.rest()
        assert b"content-length: 4" in answer
        assert answer.endswith(b"\r\n\r\ndone")


async def test_what_clients_do_wrong_is_not_written_to_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        set_up_log("info")
        async with serving() as served:
            for garbage in (b"\0" * 99, b"GET / HTTP/1.1\r\nx\r\n\r\n"):
                assert error_of(await (await served.connect(garbage)).rest())[0] == 400
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert capsys.readouterr().err == ""
