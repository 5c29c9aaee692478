"""Client side of an HTTP/1.1 connection with streamed answers, which routers use for calls of nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import httptools

from kvferry.protocol.errors import KvferryError

KEEPALIVE_S = 2.0
"""Idle time after which a connection closes, in seconds.

It is below uvicorn's limit of 5 s, so that no call uses a connection while the server closes it."""
MAX_REFUSAL_BYTES = MAX_HEAD_BYTES = 65_536
"""Maximum sizes of a refusal's body and of a response's head, in bytes."""

Callback = Callable[..., None] | None
"""Optional callback."""


class Decoder(Protocol):
    """Decoder of answers' bodies."""

    @property
    def is_empty(self) -> bool:
        """Return whether the decoder can take the next answer: no incomplete message is buffered."""
        ...

    def feed(self, data: bytes) -> Iterable[Any]:
        """Return the messages that are complete with these bytes."""
        ...


class Connection(asyncio.Protocol):
    """A connection to a server, for one exchange at a time.

    decoder   makes the decoder of an answer's body
    refusal   makes the error of a refusal, from its status, body and Retry-After header
    clock     seconds for the silence limit

    headers: headers of the answer by their names in lower case, complete once `opened` is called."""

    def __init__(
        self,
        decoder: Callable[[], Decoder],
        refusal: Callable[[int, bytes, str | None], KvferryError],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop, self._clock = asyncio.get_running_loop(), clock
        self._decoder, self._refusal_of = decoder, refusal
        self._ended: asyncio.Future[BaseException | None] | None = None
        self._left: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._frames: Decoder | None = None
        """Created for the first bytes of an answer, and reused: it takes more memory than the rest of the object."""
        self.headers: dict[str, str] = {}

    async def exchange(
        self,
        request: Sequence[bytes],
        silence_s: float | None,
        opened: Callback,
        deliver: Callback,
        reading: Callback = None,
    ) -> None:
        """Send a request, in pieces that are not copied, and read its answer to the end.

        Calls `reading` with the transport, whose reading may be paused, `opened` when the server accepts, and `deliver`
        for every message. Raises the error of a refusal, a callback's exception, OSError (including TimeoutError) if
        the connection breaks or is silent for `silence_s`, and HttpParserError if the answer is not HTTP. After an
        error or a cancel the connection is closed and calls nothing more."""
        self._silence_s, self._opened, self._deliver = silence_s, opened, deliver
        self._parser = httptools.HttpResponseParser(self)
        self.headers = {}
        self._refused, self._refusal = False, b""
        self._head_bytes: int | None = 0
        self._ended = self._loop.create_future()
        self._received_at = self._clock()
        if self._transport.is_closing():  # a write would raise RuntimeError
            self._end(ConnectionResetError("the connection was closed"))
        else:
            if reading is not None:
                reading(self._transport)
            self._transport.writelines(request)
            self._watch()
        error: BaseException | None = asyncio.CancelledError()
        try:
            error = await self._ended
        finally:
            self._ended = self._opened = self._deliver = None
            if self._frames is not None and not self._frames.is_empty:
                self._frames = None
            del self._parser  # the parser refers to this connection
            self._move_on()
            if error is not None:
                self._transport.abort()
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback refers to this frame

    def rest(self, left: Callable[[], None]) -> None:
        """Keep the connection idle; call `left` once, when the next exchange begins or the connection closes."""
        self._left, self._rested_at = left, self._loop.time()
        if self._transport.is_closing() or not self._stays:
            self.close()
        else:
            self._timer = self._loop.call_later(KEEPALIVE_S, self.close)

    def wake(self) -> bool:
        """End the idle state; return False and close if the connection is closed or too old.

        The age is checked here too, because a busy loop may not have run the timer yet."""
        if self._transport.is_closing() or self._loop.time() - self._rested_at > KEEPALIVE_S:
            self.close()
            return False
        self._move_on()
        return True

    @property
    def answered(self) -> bool:
        """Return whether the answer to the latest request has begun."""
        return self._head_bytes != 0

    def close(self) -> None:
        """Close the connection."""
        self._move_on()
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport (asyncio.Protocol)."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange with an error (asyncio.Protocol)."""
        self._move_on()
        self._end(exc or ConnectionResetError("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        """Parse received bytes (asyncio.Protocol)."""
        if self._ended is None or self._ended.done():
            self._transport.abort()
            return
        self._received_at = self._clock()
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._end(error.__context__ or error)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(ConnectionError(f"no answer in HTTP: {error}"))
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._end(ConnectionError("a header that does not end"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header (httptools callback)."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Note the status and report an accepted request (httptools callback)."""
        self._refused, self._head_bytes = self._parser.get_status_code() >= 400, None
        if self._opened and not self._refused:
            self._opened()

    def on_body(self, body: bytes) -> None:
        """Deliver the messages of the body, or collect a refusal (httptools callback)."""
        if self._refused:
            self._refusal = (self._refusal + body)[:MAX_REFUSAL_BYTES]
        elif self._deliver:
            if self._frames is None:
                self._frames = self._decoder()
            for message in self._frames.feed(body):
                self._deliver(message)

    def on_message_complete(self) -> None:
        """End the exchange with its outcome (httptools callback)."""
        self._stays = self._parser.should_keep_alive()
        error = None
        if self._refused:
            error = self._refusal_of(self._parser.get_status_code(), self._refusal, self.headers.get("retry-after"))
        self._end(error)

    def _watch(self) -> None:
        """Check for silence, with one timer that is set again only when it fires."""
        if self._silence_s is None:
            return
        left = self._received_at + self._silence_s - self._clock()
        if left > 0:
            self._timer = self._loop.call_later(left, self._watch)
        else:
            self._end(TimeoutError(f"silent for {self._silence_s:g} s"))

    def _move_on(self) -> None:
        """Leave the idle or waiting state and cancel its timer."""
        if self._timer:
            self._timer.cancel()
        left, self._timer, self._left = self._left, None, None
        if left:
            left()

    def _end(self, error: BaseException | None) -> None:
        """Set the outcome as the future's result, not its exception, which might never be retrieved."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)
