"""Redis connection that carries only calls of Lua scripts, pipelined, without the client's cost per call.

The client opens it, since it handles addresses, TLS, passwords and Sentinels. After that, calls cost neither a task nor
a stream's locks and timers, and a call is sent without waiting for the answers to earlier ones."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ResponseError

END = b"\r\n"


class Incomplete(Exception):
    """The rest of a value has not arrived."""


class ScriptConnection(asyncio.Protocol):
    """Protocol that takes over an idle connection of the client and answers calls in order.

    client_connection: the client's object, which returns to the pool once the connection is closed."""

    def __init__(self, client_connection: Any) -> None:
        self.client_connection = client_connection
        self._transport = cast(asyncio.Transport, client_connection._writer.transport)
        self._client_protocol = cast(asyncio.Protocol, self._transport.get_protocol())
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._reader = ReplyReader()
        self._transport.set_protocol(self)

    @property
    def is_usable(self) -> bool:
        """Return whether the connection is open and answers in time: no caller has given up the oldest call."""
        return not self._transport.is_closing() and not (self._waiting and self._waiting[0].done())

    def call(self, command: bytes) -> asyncio.Future[Any]:
        """Send a command; return a future of its reply, ResponseError or RedisConnectionError."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        self._transport.write(command)
        return answer

    def close(self) -> None:
        """Close the connection; waiting calls get RedisConnectionError."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Answer the calls whose replies are complete (asyncio.Protocol)."""
        try:
            for reply in self._reader.feed(data):
                answer = self._waiting.popleft()
                if answer.done():
                    continue
                if isinstance(reply, ResponseError):
                    answer.set_exception(reply)
                else:
                    answer.set_result(reply)
        except (InvalidResponse, ValueError, IndexError):
            self.close()  # not a reply of Redis, or one to no call

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the waiting calls (asyncio.Protocol)."""
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(RedisConnectionError(f"the connection broke: {exc or 'closed'}"))
        self._waiting.clear()
        self._client_protocol.connection_lost(exc)

    def eof_received(self) -> bool | None:
        """Let the transport close itself (asyncio.Protocol)."""
        return None


class ReplyReader:
    """Incremental parser of replies; an incomplete reply is parsed again from its last complete item."""

    def __init__(self) -> None:
        self._data, self._items, self._left = b"", list[Any](), 0

    def feed(self, data: bytes) -> list[Any]:
        """Return the replies that are complete with these bytes. Raises InvalidResponse or ValueError."""
        self._data += data
        at, found = 0, list[Any]()
        try:
            while at < len(self._data):
                if not self._left and self._data[at] == ord("*"):
                    end = _line_end(self._data, at)
                    self._left, self._items, at = int(self._data[at + 1 : end]), [], end + 2
                    if self._left <= 0:
                        found.append([] if not self._left else None)
                        self._left = 0
                    continue
                value, at = read(self._data, at)
                if not self._left:
                    found.append(value)
                    continue
                self._items.append(value)
                self._left -= 1
                if not self._left:
                    found.append(self._items)
        except Incomplete:
            pass
        self._data = self._data[at:]
        return found


def read(data: bytes, at: int) -> tuple[Any, int]:
    """Return the value that begins at `at`, and the position of the next one.

    Raises Incomplete; InvalidResponse and ValueError for anything that scripts cannot return."""
    end = _line_end(data, at)
    kind, line, after = data[at : at + 1], data[at + 1 : end], end + 2
    if kind == b"$":
        if (size := int(line)) < 0:
            return None, after
        if len(data) < after + size + 2:
            raise Incomplete
        return data[after : after + size], after + size + 2
    if kind == b":":
        return int(line), after
    if kind == b"*":
        items: list[Any] = []
        for _ in range(count := int(line)):
            item, after = read(data, after)
            items.append(item)
        return (items if count >= 0 else None), after
    if kind == b"+":
        return line, after
    if kind == b"_":
        return None, after
    if kind == b"-":
        return ResponseError(line.decode(errors="replace")), after
    raise InvalidResponse(f"a reply of an unknown kind: {kind!r}")


def _line_end(data: bytes, at: int) -> int:
    end = data.find(END, at)
    if end < 0:
        raise Incomplete
    return end


def packed(parts: Sequence[bytes]) -> bytes:
    """Return a command in the format of Redis' protocol."""
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])
