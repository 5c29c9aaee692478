"""HTTP to the nodes: the one place of the router that opens connections to them, and where their errors become ours.

Every token of every request passes here, so there is no task, no queue and no timeout per chunk between the socket and
who is told. A call that is cancelled closes its connection, whatever point it had reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from protocol.errors import KvferryError, NodeLost, from_body
from protocol.lease import NodeLease
from protocol.messages import CancelRequest, GenerateRequest, PrefillRequest, StepFrame
from protocol.wire import FrameReader, WireError, pack

KEEPALIVE_S = 2.0
"""Idle connections are dropped before the nodes' server does it (5 s), so that none is used as it closes."""
MAX_IDLE = 64
"""Idle connections kept to one node."""
MAX_REFUSAL_BYTES = 65_536

Address = tuple[str, int]
Told = Callable[..., None] | None


class NodeClient:
    """Calls to nodes by lease. Every call raises NodeLost when the node cannot be reached, breaks off, or says nothing
    for its time; the node's own KvferryError when it refuses; WireError when it speaks something else."""

    def __init__(
        self, router_id: str, *, connect_s: float = 2.0, answer_s: float = 10.0, silence_s: float = 3.0
    ) -> None:
        self.router_id = router_id
        self._connect_s, self._answer_s, self._silence_s = connect_s, answer_s, silence_s
        self._idle: dict[Address, list[Connection]] = {}

    async def aclose(self) -> None:
        """Drop the idle connections. No call may be under way."""
        for address in tuple(self._idle):
            self._forget(address)

    async def prefill(self, node: NodeLease, request: PrefillRequest, deliver: Callable[[Any], None]) -> None:
        """Send the attempt and deliver the messages of its answer as they come; returns when the answer ends. It may
        stay silent while the request waits in the node's queue, so no silence is too long here."""
        await self.call(node, "POST /attempts/prefill", pack(request), None, None, deliver)

    async def generate(self, node: NodeLease, request: GenerateRequest) -> None:
        await self.call(node, "POST /attempts/generate", pack(request), self._answer_s, None, None)

    async def cancel(self, node: NodeLease, request: CancelRequest) -> None:
        await self.call(node, "POST /attempts/cancel", pack(request), self._answer_s, None, None)

    async def stream(self, node: NodeLease, opened: Callable[[], None], deliver: Callable[[StepFrame], None]) -> None:
        """Read the node's token stream for this router: `opened` once it is accepted, `deliver` for every frame. Ends
        only with an error: NodeLost when it breaks or stays silent for `silence_s` (heartbeats come every 0.5 s)."""

        def step(frame: Any) -> None:
            if not isinstance(frame, StepFrame):
                raise WireError(f"a {type(frame).__name__} on a token stream")
            deliver(frame)

        await self.call(node, f"GET /streams/{self.router_id}", b"", self._silence_s, opened, step)
        raise NodeLost(f"{node.node_id} closed the token stream")

    async def call(
        self, node: NodeLease, what: str, body: bytes, silence_s: float | None, opened: Told, deliver: Told
    ) -> None:
        """`what`: method and path."""
        method, path = what.split()
        try:
            url = urlsplit(node.http_url)
            address = (url.hostname or "", url.port or 80)
            head = f"{method} {url.path}{path} HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-length: {len(body)}\r\n"
            connection = self._rested(address)
            if connection is None:
                async with asyncio.timeout(self._connect_s):
                    _, connection = await asyncio.get_running_loop().create_connection(Connection, *address)
        except (OSError, ValueError) as error:
            raise _lost(node, error) from error
        request = f"{head}content-type: application/msgpack\r\n\r\n".encode() + body
        try:
            await connection.exchange(request, silence_s, opened, deliver)
        except (OSError, httptools.HttpParserError) as error:
            self._forget(address)
            raise _lost(node, error) from error
        self._rest(address, connection)

    def _rested(self, address: Address) -> Connection | None:
        while idle := self._idle.get(address):
            if (connection := idle[-1]).wake():
                return connection
        return None

    def _forget(self, address: Address) -> None:
        """A connection broke: those that rest may have broken with it, and the next call is to find out by itself."""
        for connection in list(self._idle.get(address, ())):
            connection.close()

    def _rest(self, address: Address, connection: Connection) -> None:
        idle = self._idle.setdefault(address, [])

        def left() -> None:
            idle.remove(connection)
            if not idle:
                self._idle.pop(address, None)

        idle.append(connection)
        connection.rest(left)
        if len(idle) > MAX_IDLE:
            idle[0].close()


def _lost(node: NodeLease, error: Exception) -> NodeLost:
    return NodeLost(f"{node.node_id}: {type(error).__name__} {error}".strip())


class Connection(asyncio.Protocol):
    """A connection to a node, for one exchange at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[BaseException | None] | None = None
        self._left: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def exchange(self, request: bytes, silence_s: float | None, opened: Told, deliver: Told) -> None:
        """Send, and read the answer to its end: `opened` when it is accepted, `deliver` for every message in it. Raises
        the node's KvferryError where it refuses, what a callback raised, OSError (TimeoutError is one) where the
        connection breaks or is silent for `silence_s`, HttpParserError where no HTTP is spoken. After an error, or a
        cancel, the connection is closed and nobody is told anything any more."""
        self._silence_s, self._opened, self._deliver = silence_s, opened, deliver
        self._parser, self._frames = httptools.HttpResponseParser(self), FrameReader()
        self._headers: dict[str, str] = {}
        self._refused, self._refusal = False, b""
        self._ended = self._loop.create_future()
        self._heard = self._loop.time()
        if self._transport.is_closing():
            self._end(ConnectionResetError("the connection was closed"))
        self._transport.write(request)
        self._watch()
        error: BaseException | None = asyncio.CancelledError()
        try:
            error = await self._ended
        finally:
            self._ended = None
            self._move_on()
            if error is not None:
                self._transport.abort()
        if error is not None:
            raise error

    def rest(self, left: Callable[[], None]) -> None:
        """Wait for the next exchange; `left` is called once when it begins or the connection closes instead."""
        self._left, self._heard = left, self._loop.time()
        if self._transport.is_closing() or not self._stays:
            self.close()
        else:
            self._timer = self._loop.call_later(KEEPALIVE_S, self.close)

    def wake(self) -> bool:
        """End the rest. False: too late, also where a busy loop has not come to the timer; it is closed."""
        if self._transport.is_closing() or self._loop.time() - self._heard > KEEPALIVE_S:
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
        self._heard = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._end(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._end(error)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._refused = self._parser.get_status_code() >= 400
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
        self._end(self._error() if self._refused else None)

    def _error(self) -> KvferryError:
        """What the refusal says."""
        status = f"HTTP status {self._parser.get_status_code()}"
        try:
            error = from_body(json.loads(self._refusal), status)
        except ValueError:
            error = KvferryError(status)
        with contextlib.suppress(KeyError, ValueError):
            error.retry_after = float(self._headers["retry-after"])
        return error

    def _watch(self) -> None:
        """Look for silence; one timer at a time, set anew only when it fires."""
        if self._silence_s is None:
            return
        left = self._heard + self._silence_s - self._loop.time()
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
