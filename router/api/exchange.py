"""One generating request from its body to its last byte: admission, errors, disconnects, headers, metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from protocol.errors import Cancelled, InvalidRequest, KvferryError, Overloaded
from router.api.envelope import CALL
from router.api.generation import Choice, Generation
from router.api.http_errors import error_headers
from router.api.reply import Endpoint, Reply
from router.api.serving import Serving
from router.api.sse import dump, event
from router.call import Call
from router.text.transcript import Piece

MAX_BODY_BYTES = 64 * 1024 * 1024
_JSON = "application/json"
_EVENTS = "text/event-stream; charset=utf-8"

logger = logging.getLogger(__name__)
T = TypeVar("T")
Pieces = AsyncIterator[tuple[Choice, Piece]]


class Admission:
    """Bounds the generating requests in progress. `count` is how many there are."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0

    def enter(self) -> None:
        """Raises Overloaded; otherwise `leave` must follow."""
        if self.count >= self._limit:
            raise Overloaded(f"{self.count} requests are in progress, the limit of this router", retry_after=1.0)
        self.count += 1

    def leave(self) -> None:
        self.count -= 1


class Exchange(Response):
    """The response of a generating endpoint. It does the work when it is sent, so that it sees the client leave at any
    point, and cancels all journeys then. Headers wait for the first output: errors before it have a status."""

    def __init__(self, endpoint: Endpoint, serving: Serving, admission: Admission) -> None:
        self.background = None
        self._endpoint = endpoint
        self._serving = serving
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics, call = self._serving.metrics, scope[CALL]
        writer = _Writer(send)
        status = 500
        try:
            self._admission.enter()
            metrics.inflight.inc()
            try:
                data = await _read_body(Request(scope, receive))
                reply = await until_disconnect(receive, self._serve(data, writer, call))
                status = 200
                metrics.e2e.observe(time.monotonic() - call.arrival)
                await writer.finish(reply)
            finally:
                metrics.inflight.dec()
                self._admission.leave()
        except KvferryError as error:
            status = error.status
            await writer.fail(error)
        except Exception:
            logger.exception("%s: %s failed", call.id, self._endpoint.name)
            await writer.fail(KvferryError("internal error of the router; its log has the details"))
        finally:
            metrics.requests.labels(self._endpoint.name, str(status)).inc()

    async def _serve(self, data: bytes, writer: _Writer, call: Call) -> Reply:
        """All of the work but the last bytes: once those are out, the server reports the client as gone."""
        reply = await self._endpoint.begin(data, call)
        generation = reply.generation
        try:
            async with aclosing(generation.pieces()) as pieces:
                first = await anext(pieces)
                if reply.stream:
                    await _stream(reply, first, pieces, writer)
                else:
                    await _collect(reply, first, pieces)
        finally:
            await generation.close()
        return reply


class _Writer:
    """The response on the wire. After `start` errors can only be told in the stream."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = self._streams = False

    async def start(self, status: int, media_type: str, headers: Mapping[str, str]) -> None:
        self._started, self._streams = True, media_type == _EVENTS
        pairs = [(b"content-type", media_type.encode())]
        pairs += [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def whole(self, status: int, value: Any, headers: Mapping[str, str]) -> None:
        data = dump(value)
        await self.start(status, _JSON, {**headers, "content-length": str(len(data))})
        await self.write(data, more=False)

    async def finish(self, reply: Reply) -> None:
        """The last bytes of an answer."""
        if reply.stream:
            await self.write(reply.closing(), more=False)
        else:
            await self.whole(200, reply.body(), _route(reply.generation))

    async def fail(self, error: KvferryError) -> None:
        """Tell the client, in the way that is left; nothing is told to a client that went away."""
        if isinstance(error, Cancelled):
            return
        if not self._started:
            await self.whole(error.status, error.body(), error_headers(error))
        elif self._streams:
            await self.write(event(error.body()), more=False)


async def _stream(reply: Reply, first: tuple[Choice, Piece], pieces: Pieces, writer: _Writer) -> None:
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **_route(reply.generation)}
    await writer.start(200, _EVENTS, headers)
    await writer.write(reply.chunk(*first))
    async for choice, piece in pieces:
        data = reply.chunk(choice, piece)
        if data:
            await writer.write(data)


async def _collect(reply: Reply, first: tuple[Choice, Piece], pieces: Pieces) -> None:
    reply.take(*first)
    async for choice, piece in pieces:
        reply.take(choice, piece)


def _route(generation: Generation) -> dict[str, str]:
    return {"x-kvferry-route": str(generation.route)} if generation.route is not None else {}


async def _read_body(request: Request) -> bytes:
    """The request's body. Raises InvalidRequest when it is too long, Cancelled when the client leaves meanwhile."""
    parts, length = [], 0
    try:
        async for part in request.stream():
            parts.append(part)
            length += len(part)
            if length > MAX_BODY_BYTES:
                raise InvalidRequest(f"the request body is longer than {MAX_BODY_BYTES} bytes")
    except ClientDisconnect as error:
        raise Cancelled("the client went away") from error
    return b"".join(parts)


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away; raises Cancelled then. The request's body
    must have been read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Cancelled("the client went away")
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
