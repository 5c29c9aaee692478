"""How a request comes in: its key and its Call; if it generates, admission, body, and a client that may leave.

`Door` stands around the whole application, an `Exchange` behind each generating route.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Mapping
from contextlib import aclosing
from typing import Protocol, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from process.disconnect import disconnected
from protocol.errors import Cancelled, KvferryError, Overloaded, RequestTooLarge, Unauthorized
from protocol.metrics import RouterMetrics
from protocol.settings import RouterSettings
from router.api.fold import Answer, Endpoint
from router.api.generation import Generation
from router.api.http_errors import error_response
from router.api.pool import Pools
from router.api.responder import Responder
from router.api.schemas import GenerationBody, RequestBody, parse
from router.call import CALL, Call

OPEN_PATHS = frozenset(("/health", "/ready", "/metrics"))
AT_ONCE = 32
"""As many of the longest bodies may be arriving at the same time."""
AGAIN_S = 0.1
"""Until work that ignored a cancellation is cancelled again."""
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Door:
    """ASGI middleware: what it wraps finds the request's Call in the scope, under CALL; its id goes on every response.
    With an API key in the settings clients must present it outside OPEN_PATHS. A POST to one of `exchanges` goes there
    directly: what routing and its layers cost, they would cost for every token."""

    def __init__(self, app: ASGIApp, settings: RouterSettings, exchanges: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._exchanges = exchanges
        self._key = settings.api_key.encode()
        self._timeout_s = settings.request_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given, arrival = headers.get("x-request-id", ""), time.monotonic()
        call = scope[CALL] = Call(
            given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex,
            arrival=arrival,
            deadline=arrival + self._timeout_s,
            trace=headers.get("traceparent", ""),
        )

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", call.id.encode())]
            await send(message)

        if self._key and scope["path"] not in OPEN_PATHS and not self._known(headers.get("authorization", "")):
            refused = Unauthorized("missing or wrong API key; send it as 'Authorization: Bearer KEY'")
            response = error_response(refused, scope["path"])
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, stamped)
            return
        exchange = self._exchanges.get(scope["path"]) if scope["method"] == "POST" else None
        await (exchange or self._app)(scope, receive, stamped)

    def _known(self, authorization: str) -> bool:
        """Header values arrive decoded as latin-1; the key is compared in bytes, in constant time."""
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode("latin-1"), self._key)


class Admission:
    """Bounds the generating requests in progress, from the end of their bodies on: a client that is slow to send one
    takes nobody's place. `count` is how many there are."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0

    def check(self) -> None:
        """Raises Overloaded when there is no place: before a body, nobody need send it."""
        if self.count >= self._limit:
            raise Overloaded(f"{self.count} requests are in progress, the limit of this router", retry_after=1.0)

    def enter(self) -> None:
        """Raises Overloaded; otherwise `leave` must follow."""
        self.check()
        self.count += 1

    def leave(self) -> None:
        self.count -= 1


class BodyReader:
    """Of one router; `longest` is in bytes."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._held = 0

    async def read(self, request: Request) -> bytes:
        """The request's body. Raises RequestTooLarge, as soon as the header says so; Overloaded when too much is
        arriving; Cancelled when the client leaves meanwhile."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._longest:
            raise self._too_large()
        parts, size = [], 0
        try:
            async for part in request.stream():
                size += len(part)
                self._held += len(part)
                if size > self._longest:
                    raise self._too_large()
                if self._held > AT_ONCE * self._longest:
                    raise Overloaded("too many long bodies are arriving", retry_after=1.0)
                parts.append(part)
            return b"".join(parts)
        except ClientDisconnect as error:
            raise Cancelled("the client went away") from error
        finally:
            self._held -= size

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"the request body is longer than {self._longest} bytes")


class Finishing(Protocol):
    """An answer of which only the last bytes are still to be sent."""

    async def finish(self, responder: Responder) -> None: ...


class Exchange:
    """ASGI application of an endpoint whose work the nodes do. It sees the client leave at any point, and cancels all
    journeys then. Headers wait for the first output: errors before it have a status."""

    def __init__(
        self, path: str, pools: Pools, admission: Admission, reader: BodyReader, metrics: RouterMetrics
    ) -> None:
        self._path = path
        self._pools = pools
        self._admission = admission
        self._reader = reader
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, metrics, responder, status = scope[CALL], self._metrics, Responder(send, self._path), 500
        try:
            self._admission.check()
            with metrics.inflight.track_inprogress():
                data = await self._reader.read(Request(scope, receive))
                self._admission.enter()
                try:
                    answer = await until_disconnect(receive, self._work(call, data, responder))
                    status = 200
                    metrics.e2e.observe(time.monotonic() - call.arrival)
                    await answer.finish(responder)
                finally:
                    self._admission.leave()
        except KvferryError as error:
            status = error.status
            await responder.fail(error)
        except Exception:
            logger.exception("%s: %s failed", call.id, self._path)
            await responder.fail(KvferryError("internal error of the router; its log has the details"))
        finally:
            metrics.requests.labels(self._path, str(status)).inc()

    async def _work(self, call: Call, data: bytes, responder: Responder) -> Finishing:
        """All of the work but the last bytes: once those are out, the server reports the client as gone."""
        raise NotImplementedError


class Generating(Exchange):
    """Of an endpoint that generates."""

    def __init__(
        self, endpoint: Endpoint, pools: Pools, admission: Admission, reader: BodyReader, metrics: RouterMetrics
    ) -> None:
        super().__init__(endpoint.path, pools, admission, reader, metrics)
        self._endpoint = endpoint

    async def _work(self, call: Call, data: bytes, responder: Responder) -> Answer:
        request = parse(self._endpoint.body, data)
        body = await self._asked(call, request)
        pool = self._pools.pool(body.model)
        generation = Generation(pool, await pool.specs(call, body, len(data)), body.text_options(), n=body.n or 1)
        try:
            async with aclosing(generation.pieces()) as pieces:
                first = await anext(pieces)
                answer = self._endpoint.shape(call, pool, request, generation)
                await answer.fold(first, pieces, responder)
                await answer.settle()
        finally:
            await generation.close()
        return answer

    async def _asked(self, call: Call, request: RequestBody) -> GenerationBody:
        if self._endpoint.asked is not None:
            return await self._endpoint.asked(call, request, self._pools)
        assert isinstance(request, GenerationBody)
        return request


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away; raises Cancelled then. The request's body
    must have been read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Cancelled("the client went away")
    finally:
        leaving.cancel()
        await _ended(working)


async def _ended(work: asyncio.Future[T]) -> None:
    """Cancel until it ends: a library below may swallow a cancellation (asyncio.wait_for did before Python 3.12), and
    work that nobody waits for any more would run on to its last token."""
    while not work.done():
        work.cancel()
        await asyncio.wait((work,), timeout=AGAIN_S)
    if not work.cancelled():
        work.exception()
