"""The reading end of a token stream: one GET whose answer goes on for ever, parsed where its bytes arrive.

Every token of every request passes here, so there is no task, no queue and no timeout per frame between the socket and
who is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools
import httpx

from protocol.messages import StepFrame
from protocol.wire import FrameReader, WireError
from router.nodes.refusals import refusal


async def read_frames(
    url: str,
    *,
    connect_s: float,
    silence_s: float,
    opened: Callable[[], None],
    deliver: Callable[[StepFrame], None],
) -> None:
    """GET `url` (plain http) and `deliver` every frame of its answer; `opened` comes first. Returns when the answer
    ends. Raises the node's own KvferryError where it refuses; OSError (TimeoutError is one) where it cannot be
    connected, breaks off, or says nothing for `silence_s`; httptools.HttpParserError or WireError where it speaks
    something else; httpx.InvalidURL.
    """
    to = httpx.URL(url)
    reader = _Reader(b"GET %b HTTP/1.1\r\nhost: %b\r\n\r\n" % (to.raw_path, to.netloc), silence_s, opened, deliver)
    async with asyncio.timeout(connect_s):
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: reader, to.host, to.port or 80)
    try:
        await reader.ended
    finally:
        reader.close()
        transport.abort()


class _Reader(asyncio.Protocol):
    """`ended` is done once nothing more will be delivered."""

    def __init__(
        self, request: bytes, silence_s: float, opened: Callable[[], None], deliver: Callable[[StepFrame], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._request, self._silence_s = request, silence_s
        self._opened, self._deliver = opened, deliver
        self._parser = httptools.HttpResponseParser(self)
        self._frames = FrameReader()
        self._headers: dict[str, str] = {}
        self._refusal = b""
        self._refused = False
        self._heard = self._loop.time()
        self._watch = self._loop.call_later(silence_s, self._check)

    def close(self) -> None:
        """Tell nobody anything any more."""
        self._watch.cancel()
        self.ended.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        if self.ended.done():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._end(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionResetError("the connection was closed"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._refused = self._parser.get_status_code() >= 400
        if not self._refused:
            self._opened()

    def on_body(self, body: bytes) -> None:
        if self._refused:
            self._refusal += body
            return
        for frame in self._frames.feed(body):
            if not isinstance(frame, StepFrame):
                raise WireError(f"a {type(frame).__name__} on a token stream")
            self._deliver(frame)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self._end(refusal(status, self._headers, self._refusal) if self._refused else None)

    def _check(self) -> None:
        """Look for silence; one timer at a time, set anew only when it fires."""
        left = self._heard + self._silence_s - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._check)
        else:
            self._end(TimeoutError(f"silent for {self._silence_s:g} s"))

    def _end(self, error: BaseException | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
