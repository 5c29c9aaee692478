"""How a request comes in: its key and its Call; if it generates, admission, body, and a client that may leave.

`Door` stands around the whole application, an `Exchange` behind each generating route.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Generic, Protocol, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from process.disconnect import until_disconnect
from process.log import REQUEST
from process.request_path import Root
from process.tracing import TRACER
from protocol.errors import KvferryError, Overloaded, Unauthorized
from protocol.metrics import RouterMetrics
from protocol.settings import RouterSettings
from router.api.beams import BeamGeneration
from router.api.bodies.generating import GenerationBody
from router.api.bodies.reader import BodyReader, parse
from router.api.fold import Answer, Endpoint
from router.api.generation import Generation
from router.api.http_errors import error_response
from router.api.pool import Pools
from router.api.responder import Finishing, Responder
from router.api.visit import Visit
from router.call import CALL, Call
from router.tenants.tenancy import Tenancy
from router.tenants.tenant import NOBODY, Tenant

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/metrics", "/dashboard"))
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

logger = logging.getLogger(__name__)


class Door:
    """ASGI middleware: what it wraps finds the request's Call in the scope, under CALL; its id goes on every response.
    Where there are API keys clients must present one outside OPEN_PATHS; it tells whose request it is. A POST to one of
    `exchanges` goes there directly: what routing and its layers cost, they would cost for every token."""

    def __init__(
        self, app: ASGIApp, settings: RouterSettings, tenancy: Tenancy, exchanges: Mapping[str, ASGIApp]
    ) -> None:
        self._app = app
        self._exchanges = exchanges
        self._tenancy = tenancy
        self._timeout_s = settings.request_timeout
        self._root = Root(settings.root_path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, scope = self._root.local(scope)
        headers = Headers(scope=scope)
        tenant = self._tenant(headers)
        name = tenant.name if tenant else ""
        given, arrival = headers.get("x-request-id", ""), time.monotonic()
        call = scope[CALL] = Call(
            given if _SANE_ID.fullmatch(given) else secrets.token_hex(16),
            arrival=arrival,
            deadline=arrival + self._timeout_s,
            tenant=name,
            realm=self._tenancy.realm(name),
            trace=_traceparent(headers),
        )

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", call.id.encode())]
            await send(message)

        REQUEST.set(call.id)
        if tenant is None and path not in OPEN_PATHS:
            refused = Unauthorized("missing or wrong API key; send it as 'Authorization: Bearer KEY'")
            response = error_response(refused, path)
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, stamped)
            return
        exchange = self._exchanges.get(path) if scope["method"] == "POST" else None
        await (exchange or self._app)(scope, receive, stamped)

    def _tenant(self, headers: Headers) -> Tenant | None:
        """Whose request it is; None where it had to tell and did not: by `Authorization: Bearer KEY`, or by
        `x-api-key`, which clients of the Messages API send. Header values arrive decoded as latin-1."""
        keyring = self._tenancy.keyring
        if not keyring.guards:
            return NOBODY
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = (token if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()
        return keyring.tenant(key.encode("latin-1")) if key else None


def _traceparent(headers: Headers) -> str:
    """The client's, if it is one."""
    given = headers.get("traceparent", "")
    return given if given and _TRACEPARENT.fullmatch(given) else ""


class Admission:
    """Bounds the generating requests in progress, from the end of their bodies on: a client that is slow to send one
    takes nobody's place. `count` is how many there are."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0

    def check(self, own: int = 0) -> None:
        """Raises Overloaded when there is no place: before a body, nobody need send it. `own`: requests of the same
        tenant, of which there may be no more than places are left: one tenant alone never takes all."""
        if self.count >= self._limit or own > self._limit - self.count:
            raise Overloaded(f"{self.count} requests are in progress, the limit of this router", retry_after=1.0)

    def enter(self, own: int = 0) -> None:
        """Raises Overloaded; otherwise `leave` must follow."""
        self.check(own)
        self.count += 1

    def go_on(self) -> None:
        """For work that outlives the request that entered for it; `leave` must follow for each."""
        self.count += 1

    def leave(self) -> None:
        self.count -= 1


class Placed(Protocol):
    """What an endpoint of any kind tells an exchange."""

    @property
    def path(self) -> str: ...


Described = TypeVar("Described", bound=Placed)


class Exchange(Generic[Described]):
    """ASGI application of an endpoint whose work the nodes do. It sees the client leave at any point, and cancels all
    journeys then. Headers wait for the first output: errors before it have a status."""

    def __init__(
        self,
        endpoint: Described,
        pools: Pools,
        admission: Admission,
        reader: BodyReader,
        tenancy: Tenancy,
        metrics: RouterMetrics,
    ) -> None:
        self.endpoint = endpoint
        self._path = endpoint.path
        self._pools = pools
        self._admission = admission
        self._reader = reader
        self._tenancy = tenancy
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, metrics, status = scope[CALL], self._metrics, 500
        span = TRACER.start("request", call.trace, endpoint=self._path, id=call.id, tenant=call.tenant)
        visit = Visit(call, self._tenancy, metrics, span)
        responder = Responder(send, self._path, visit.headers)
        try:
            with metrics.inflight.track_inprogress(), visit:
                self._admission.check(visit.running)
                data = await self._reader.read(Request(scope, receive))
                self._admission.enter(visit.running)
                try:
                    answer = await until_disconnect(receive, self._work(visit, data, responder))
                    status = 200
                    metrics.e2e.observe(time.monotonic() - call.arrival)
                    await answer.finish(responder)
                finally:
                    self._admission.leave()
        except KvferryError as error:
            status = error.status
            visit.refused(error)
            count_error(metrics, error)
            await responder.fail(error)
        except Exception:
            logger.exception("%s: %s failed", call.id, self._path)
            failed = KvferryError("internal error of the router; its log has the details")
            count_error(metrics, failed)
            await responder.fail(failed)
        finally:
            metrics.requests.labels(self._path, str(status)).inc()
            visit.over(status)

    async def _work(self, visit: Visit, data: bytes, responder: Responder) -> Finishing:
        """All of the work but the last bytes: once those are out, the server reports the client as gone."""
        raise NotImplementedError


class Generating(Exchange[Endpoint]):
    """Of an endpoint that generates."""

    async def _work(self, visit: Visit, data: bytes, responder: Responder) -> Answer:
        body, size = await self._asked(visit.call, data)
        pool = self._pools.pool(body.model)
        parsing = body.parsing(pool.text)
        specs = await pool.specs(visit.prefer(body.priority), body, size)
        if body.use_beam_search:
            generation: Generation = BeamGeneration(pool, specs, body)
        else:
            generation = Generation(pool, specs, body.text_options(), parsing, n=body.sequences())
        if self.endpoint.later is not None:
            promise = await self.endpoint.later(visit, pool, body, generation)
            if promise is not None:
                return promise
        generation.newcomer = await visit.turn(pool.turns, generation.size)
        try:
            async with aclosing(generation.pieces()) as pieces:
                first = await anext(pieces)
                visit.began(generation.used)
                answer = self.endpoint.shape(visit.call, pool, body, generation)
                await answer.fold(first, pieces, responder)
                await answer.settle()
        finally:
            await generation.close()
        return answer

    async def _asked(self, call: Call, data: bytes) -> tuple[GenerationBody, int]:
        """What the body asks of a model, and the bytes of all that it names."""
        request = parse(self.endpoint.body, data)
        if self.endpoint.asked is not None:
            chat = await self.endpoint.asked(call, request, self._pools)
            return chat, len(data) + chat.earlier
        assert isinstance(request, GenerationBody)
        return request, len(data)


def count_error(metrics: RouterMetrics, error: KvferryError) -> None:
    """If it is not the client's mistake."""
    if error.status == 429 or error.status >= 500:
        metrics.errors.labels(str(error.status), error.code).inc()
