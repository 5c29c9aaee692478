"""HTTP server side of the mock nodes and engines: as small as possible, so that it uses little CPU."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import cast

import httptools

HOST = "127.0.0.1"


class Exchange(asyncio.Protocol):
    """Server side of a connection; `answer(path, body, exchange)` is called for each request.

    `writable` is set while the client keeps up, `closed` once it is gone."""

    def __init__(self, answer: Callable[[str, bytes, Exchange], None]) -> None:
        self._answer = answer
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body = "", b""
        self.writable, self.closed = asyncio.Event(), False
        self.writable.set()

    def send(self, body: bytes, status: str = "202 Accepted") -> None:
        """Send a whole response."""
        self._transport.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status.encode(), len(body), body))

    def begin(self) -> None:
        """Begin a chunked response."""
        self._transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        """Send a part of the response; an empty one ends it."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url.decode(), b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._answer(self._path, self._body, self)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.writable.set()


async def serve(answer: Callable[[str, bytes, Exchange], None], port: int) -> None:
    """Serve on the loopback address until the standard input ends."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    server = await loop.create_server(lambda: Exchange(answer), HOST, port)
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    server.close()
