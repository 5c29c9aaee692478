"""uvicorn's handling of one request, changed so that a response's head is written together with its first bytes.

Each write is a system call and wakes the peer: a large share of the cost of a short answer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any, Literal, cast

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from kvferry.runtime.eager_start import ENDED

_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"connection"))
"""Headers that tell where a response ends."""


class ResponseCycle(RequestResponseCycle):
    """Implements uvicorn's cycle, without its access log.

    The head of a response waits for the body's first bytes, for two turns of the event loop at most.

    on_disconnect  callback of `watch`; None: no watch
    """

    on_disconnect: Callable[[], None] | None = None
    _head = b""

    @classmethod
    def of(cls, cycle: RequestResponseCycle) -> ResponseCycle:
        """Turn a new cycle of uvicorn into one of this class; uvicorn does not let the class be chosen."""
        cycle.__class__ = cls
        assert isinstance(cycle, cls)
        cycle.message_event = LightEvent(is_set=cycle.message_event.is_set())
        return cycle

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` once if the client closes its connection before the response is complete, or already has.

        Returns a function that ends the watch."""
        self.flow.resume_reading()
        if self.disconnected:
            asyncio.get_running_loop().call_soon(callback)
        else:
            self.on_disconnect = callback
        return self.unwatch

    def unwatch(self) -> None:
        """End the watch."""
        self.on_disconnect = None

    def leave(self) -> None:
        """Record that the client has disconnected."""
        self.disconnected = True
        self.message_event.set()
        callback, self.on_disconnect = self.on_disconnect, None
        if callback is not None:
            callback()

    def send(self, message: Any) -> Awaitable[None]:  # type: ignore[override]
        """Send a part of the response (ASGI), at once if the client keeps up: a coroutine costs as much as the rest.

        Raises RuntimeError for a part out of order."""
        if self.flow.write_paused and not self.disconnected:
            return self._send_later(message)
        self._send_now(message)
        return cast(Awaitable[None], ENDED)

    def write_chunk(self, data: bytes) -> bool:
        """Write a part of a response that streams; return False, with nothing written, where `send` has more to do."""
        if self.flow.write_paused or self.disconnected or self._head or not self.chunked_encoding:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    async def _send_later(self, message: Any) -> None:
        await self.flow.drain()
        self._send_now(message)

    def _send_now(self, message: Any) -> None:
        if self.disconnected:
            return
        kind = message["type"]
        if not self.response_started and kind == "http.response.start":
            self._begin(message)
        elif self.response_started and not self.response_complete and kind == "http.response.body":
            self._continue(message.get("body", b""), message.get("more_body", False))
        else:
            raise RuntimeError(f"unexpected ASGI message {kind!r}")

    def _begin(self, message: Message) -> None:
        self.response_started, self.waiting_for_100_continue = True, False
        status = message["status"]
        lines = [STATUS_LINE[status]]
        closes = False
        for name, value in (*self.default_headers, *message.get("headers", ())):
            name, line = header_line(name, value)
            lines.append(line)
            if name not in _FRAMING:
                continue
            if name == b"content-length" and self.chunked_encoding is None:
                self.expected_content_length, self.chunked_encoding = int(value), False
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self.expected_content_length, self.chunked_encoding = 0, True
            elif name == b"connection" and b"close" in [token.strip() for token in value.lower().split(b",")]:
                self.keep_alive, closes = False, True
        if not self.keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and status not in (204, 304):
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._flush)  # behind what was scheduled together with it

    def _flush(self) -> None:
        """Write the head if it still waits for a body."""
        head, self._head = self._head, b""
        if head and not self.transport.is_closing():
            self.transport.write(head)

    def _continue(self, body: bytes, more: bool) -> None:
        head, self._head = self._head, b""
        if self.scope["method"] == "HEAD":
            data, self.expected_content_length = b"", 0
        elif self.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                data += b"0\r\n\r\n"
        elif len(body) > self.expected_content_length:
            raise RuntimeError("Response content longer than Content-Length")
        else:
            data, self.expected_content_length = body, self.expected_content_length - len(body)
        if head or data:
            self.transport.write(head + data)
        if not more:
            self._end()

    def _end(self) -> None:
        if self.expected_content_length != 0:
            raise RuntimeError("Response content shorter than Content-Length")
        self.response_complete, self.on_disconnect = True, None
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()


class LightEvent(asyncio.Event):
    """An asyncio.Event without its deque (760 bytes per open stream) while nothing waits for it."""

    _waiters: Any = ()

    def __init__(self, *, is_set: bool) -> None:
        self._value = is_set

    async def wait(self) -> Literal[True]:
        """Wait until the event is set."""
        if not self._value and not isinstance(self._waiters, deque):
            self._waiters = deque()
        try:
            return await super().wait()
        finally:
            if not self._waiters:
                self._waiters = ()


class Pipeline(list[Any]):
    """Requests of a connection that wait for earlier ones, the next one last; an empty deque would take 760 bytes."""

    def appendleft(self, each: Any) -> None:
        """Add a request after all waiting ones."""
        self.insert(0, each)


def lighten(protocol: HttpToolsProtocol) -> None:
    """Reduce the memory of a new connection while nothing waits on it."""
    protocol.pipeline = cast(Any, Pipeline())
    protocol.flow._is_writable_event = LightEvent(is_set=True)


@lru_cache(maxsize=512)
def header_line(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """Return a header's name in lower case, and its line. Raises RuntimeError for invalid characters."""
    if HEADER_RE.search(name):
        raise RuntimeError("Invalid HTTP header name.")
    if HEADER_VALUE_RE.search(value):
        raise RuntimeError("Invalid HTTP header value.")
    name = name.lower()
    return name, b"%b: %b\r\n" % (name, value)
