"""HTTP connection to a node and the parsing of its answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

import httptools

from kvferry.protocol.wire import FrameReader
from kvferry.router.nodes.message_validation import refusal_of

KEEPALIVE_S = 2.0
"""Idle connections are dropped before the nodes' server does it (5 s), so that none is used as it closes."""
MAX_REFUSAL_BYTES = MAX_HEAD_BYTES = 65_536

Told = Callable[..., None] | None


class Connection(asyncio.Protocol):
    """A connection to a node, for one exchange at a time. clock: seconds for silence."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._loop, self._clock = asyncio.get_running_loop(), clock
        self._ended: asyncio.Future[BaseException | None] | None = None
        self._left: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def exchange(self, request: bytes, silence_s: float | None, opened: Told, deliver: Told) -> None:
        """Send, and read the answer to its end: `opened` when it is accepted, `deliver` for every message in it.

        Raises the node's KvferryError where it refuses, what a callback raised, OSError (TimeoutError is one) where the
        connection breaks or is silent for `silence_s`, HttpParserError where no HTTP is spoken. After an error, or a
        cancel, the connection is closed and nobody is told anything any more."""
        self._silence_s, self._opened, self._deliver = silence_s, opened, deliver
        self._parser, self._frames = httptools.HttpResponseParser(self), FrameReader()
        self._headers: dict[str, str] = {}
        self._refused, self._refusal = False, b""
        self._head_bytes: int | None = 0
        self._ended = self._loop.create_future()
        self._heard = self._clock()
        if self._transport.is_closing():
            self._end(ConnectionResetError("the connection was closed"))
        self._transport.write(request)
        self._watch()
        error: BaseException | None = asyncio.CancelledError()
        try:
            error = await self._ended
        finally:
            self._ended = self._opened = self._deliver = None
            del self._parser  # which holds this connection
            self._move_on()
            if error is not None:
                self._transport.abort()
        if error is not None:
            try:
                raise error
            finally:
                del error  # which holds this frame now

    def rest(self, left: Callable[[], None]) -> None:
        """Wait for the next exchange; `left` is called once when it begins or the connection closes instead."""
        self._left, self._rested_at = left, self._loop.time()
        if self._transport.is_closing() or not self._stays:
            self.close()
        else:
            self._timer = self._loop.call_later(KEEPALIVE_S, self.close)

    def wake(self) -> bool:
        """End the rest. False: too late, also where a busy loop has not come to the timer; it is closed."""
        if self._transport.is_closing() or self._loop.time() - self._rested_at > KEEPALIVE_S:
            self.close()
            return False
        self._move_on()
        return True

    def close(self) -> None:
        self._move_on()
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._move_on()
        self._end(exc or ConnectionResetError("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        if self._ended is None or self._ended.done():
            self._transport.abort()
            return
        self._heard = self._clock()
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._end(error.__context__ or error)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(ConnectionError(f"no answer in HTTP: {error}"))
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._end(ConnectionError("a header without end"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._refused, self._head_bytes = self._parser.get_status_code() >= 400, None
        if self._opened and not self._refused:
            self._opened()

    def on_body(self, body: bytes) -> None:
        if self._refused:
            self._refusal = (self._refusal + body)[:MAX_REFUSAL_BYTES]
        elif self._deliver:
            for message in self._frames.feed(body):
                self._deliver(message)

    def on_message_complete(self) -> None:
        self._stays = self._parser.should_keep_alive()
        error = None
        if self._refused:
            error = refusal_of(self._parser.get_status_code(), self._refusal, self._headers.get("retry-after"))
        self._end(error)

    def _watch(self) -> None:
        """Look for silence; one timer at a time, set anew only when it fires."""
        if self._silence_s is None:
            return
        left = self._heard + self._silence_s - self._clock()
        if left > 0:
            self._timer = self._loop.call_later(left, self._watch)
        else:
            self._end(TimeoutError(f"silent for {self._silence_s:g} s"))

    def _move_on(self) -> None:
        """Neither waiting for words nor at rest any more."""
        if self._timer:
            self._timer.cancel()
        left, self._timer, self._left = self._left, None, None
        if left:
            left()

    def _end(self, error: BaseException | None) -> None:
        """The outcome is the future's result, never its exception: nobody may be left to retrieve it."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)
