"""Handling of one request on its stream from Envoy: checks, placement, answers, and the end of the response."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request

from kvferry.endpoint_picker import replies
from kvferry.endpoint_picker.bodies import PickedBody, read_body, read_prompts
from kvferry.endpoint_picker.ext_proc import BodyMode
from kvferry.endpoint_picker.incoming import Incoming, IncomingBody, ProtocolError
from kvferry.endpoint_picker.objectives import Objectives
from kvferry.endpoint_picker.pick import Pick
from kvferry.endpoint_picker.picker import PickRequest
from kvferry.endpoint_picker.request_head import RequestHead, served_endpoint, status_of
from kvferry.endpoint_picker.response_meter import ResponseMeter
from kvferry.endpoint_picker.services import Services
from kvferry.protocol.errors import Cancelled, KvferryError, Unauthorized
from kvferry.router.api.admission import AdmittedRequest, TokenUsage
from kvferry.router.api.inference_route import count_error
from kvferry.router.api.ingress import NO_KEY, new_call
from kvferry.router.request_context import CALL, RequestContext
from kvferry.runtime.disconnect import until_disconnect
from kvferry.runtime.log import REQUEST
from kvferry.runtime.tracing import TRACER

log = logging.getLogger(__name__)

Send = Callable[[Any], Awaitable[None]]


class ResponseCut(Exception):
    """The response exceeded its deadline."""


class Exchange:
    """One request of Envoy. `run` returns when the response has ended, or when an error was answered.

    It raises ProtocolError for messages out of order, and ResponseCut at the deadline of a response that began."""

    def __init__(self, services: Services, incoming: Incoming, send: Send) -> None:
        self._services, self._incoming, self._send = services, incoming, send
        self._meter = ResponseMeter()
        self._tokens = self._status = 0
        self._sequences = 1
        self._pick: Pick | None = None

    async def run(self) -> None:
        """Place the request, and pass its response on."""
        try:
            first = await self._incoming.read(self._services.settings.body_timeout)
        except TimeoutError:
            return
        if first is None:
            return
        if first.WhichOneof("request") != "request_headers":
            raise ProtocolError("a stream must begin with the head of a request")
        head, more = RequestHead.of(first), dict[str, str]()
        try:
            await self._admit(head, more)
        except Cancelled:
            self._count(head, Cancelled.status)
        except KvferryError as error:
            await self._refuse(head, error, more)
        except (ProtocolError, ResponseCut):
            raise
        except Exception:
            if self._pick is not None:
                raise
            log.exception("%s failed", head.path)
            await self._refuse(
                head, KvferryError("internal error of the endpoint picker; its log has the details"), more
            )

    async def _admit(self, head: RequestHead, more: dict[str, str]) -> None:
        """Check the key and the limits, then serve the request; fill `more` with headers for an error."""
        services = self._services
        registry, metrics = services.tenant_registry, services.metrics
        tenant = registry.keyring.presented(head.headers)
        name = tenant.name if tenant else ""
        call = new_call(head.headers, name, registry.realm(name), services.settings.request_timeout)
        REQUEST.set(call.id)
        more["x-request-id"] = call.id
        if tenant is None:
            more["www-authenticate"] = "Bearer"
            raise Unauthorized(NO_KEY)
        span = TRACER.start("request", call.trace, endpoint=_endpoint(head), id=call.id, tenant=name)
        admitted = AdmittedRequest(call, registry, metrics, span)
        more.update(admitted.headers())
        try:
            with metrics.inflight.track_inprogress(), admitted, _cancelled():
                services.limit.check(admitted.running)
                await self._serve(head, admitted)
        except KvferryError as error:
            self._status = error.status
            admitted.refused(error)
            raise
        finally:
            admitted.over(self._status)

    async def _serve(self, head: RequestHead, admitted: AdmittedRequest) -> None:
        services = self._services
        data, body = await self._read(head, admitted.call)
        services.limit.enter(admitted.running)
        try:
            pick = await until_disconnect(self._incoming.departure, self._place(head, admitted, data))
            await self._answer(head, pick, data, body)
            await self._response(head, pick, admitted)
        finally:
            if self._pick is not None:
                self._pick.end()
            services.limit.leave()
        self._count(head, self._status)

    async def _read(self, head: RequestHead, call: RequestContext) -> tuple[bytes | None, IncomingBody | None]:
        """Return the request's body; None if there is none, or if it comes in parts that cannot be buffered."""
        mode = head.request_mode
        if head.ended or mode not in (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED):
            return None, None
        whole = mode == BodyMode.BUFFERED
        if whole:
            await self._forward("request_headers", b"", mode, last=False)
        body = IncomingBody(self._incoming, self._services.settings.body_timeout, whole=whole)
        scope = {"type": "http", "method": "POST", "headers": head.headers.raw, CALL: call, "client": None}
        return await self._services.reader.read(Request(scope, body.receive)), body

    async def _place(self, head: RequestHead, admitted: AdmittedRequest, data: bytes | None) -> Pick:
        """Wait for the tenant's turn and place the request."""
        services = self._services
        body = PickedBody() if data is None else read_body(head.path, data)
        pool = services.models.pool(body.model)
        objectives = Objectives.of(head.headers)
        admitted.identify(objectives.applied(admitted.prefer(body, session=objectives.flow)))
        call = admitted.call
        parsed = await read_prompts(body, data or b"", pool, call.tenant)
        await admitted.turn(pool.turns, parsed.size)
        self._tokens, self._sequences = parsed.tokens, parsed.size.sequences
        pick_request = PickRequest(
            parsed.prompts, parsed.tokens, parsed.size.sequences, body.cache_salt or "", pool.adapter[1], head.subset,
            call.itl_s, lambda: min(call.deadline, call.first_by) - time.monotonic(),
        )  # fmt: skip
        self._pick = await services.pickers[pool.text.name].pick(pick_request)
        return self._pick

    async def _answer(self, head: RequestHead, pick: Pick, data: bytes | None, body: IncomingBody | None) -> None:
        """Report the request's endpoint to Envoy, and return its body."""
        log.debug("%s goes to %s, of which %d tokens are cached", head.path, pick.endpoints, pick.cached_len)
        if data is not None and head.request_mode == BodyMode.BUFFERED:
            await self._send(replies.body_placed(pick.endpoints))
            return
        await self._send(replies.header_placed(pick.endpoints))
        if data is not None and body is not None:
            await self._forward("request_body", data, head.request_mode, last=not body.trailers)
            if body.trailers:
                await self._forward("request_trailers", b"", head.request_mode, last=True)

    async def _response(self, head: RequestHead, pick: Pick, admitted: AdmittedRequest) -> None:
        """Pass the response on until it ends or the stream closes."""
        while True:
            left_s = admitted.call.deadline - time.monotonic()
            try:
                message = await self._incoming.read(max(left_s, 0.001))
            except TimeoutError:
                raise ResponseCut(f"{admitted.call.id}: the response passed its deadline") from None
            if message is None:
                if not self._status:
                    raise Cancelled("the client disconnected")
                return
            kind = message.WhichOneof("request")
            if kind == "response_headers":
                self._begin(message, pick, admitted)
            elif kind == "response_body":
                self._meter.take(message.response_body.body)
            elif kind not in ("response_trailers", "request_body", "request_trailers"):
                raise ProtocolError(f"{kind} came after the head of the request")
            part = getattr(message, kind)
            last = kind == "response_trailers" or getattr(part, "end_of_stream", False)
            mode = head.response_mode if kind.startswith("response") else head.request_mode
            await self._forward(kind, getattr(part, "body", b""), mode, last=last)
            if last and kind.startswith("response"):
                return

    def _begin(self, message: Any, pick: Pick, admitted: AdmittedRequest) -> None:
        """Note the head of the response."""
        self._status = status_of(message) or 200
        pick.served(served_endpoint(message))
        pick.began(self._status)
        admitted.began(lambda: self._used(pick))

    def _used(self, pick: Pick) -> TokenUsage:
        """Return the tokens used so far; none by a response that is an error."""
        if self._status >= 400:
            return TokenUsage()
        cached = self._meter.cached
        output, itl_s = self._meter.output, self._meter.itl_s(self._sequences)
        return TokenUsage(self._tokens, pick.cached_len if cached is None else cached, output, itl_s)

    async def _forward(self, phase: str, data: bytes, mode: int, *, last: bool) -> None:
        for reply in replies.passed(phase, data, mode, last=last):
            await self._send(reply)

    async def _refuse(self, head: RequestHead, error: KvferryError, more: Mapping[str, str]) -> None:
        count_error(self._services.metrics, error)
        self._count(head, error.status)
        await self._send(replies.refused(error, head.path, more))

    def _count(self, head: RequestHead, status: int) -> None:
        self._services.metrics.requests.labels(_endpoint(head), str(status)).inc()


def _endpoint(head: RequestHead) -> str:
    """Return the path as a label of few values."""
    known = ("/v1/chat/completions", "/v1/completions")
    return next((path for path in known if head.path.endswith(path)), "other")


@contextmanager
def _cancelled() -> Iterator[None]:
    """Translate the cancellation of a stream: the client or the gateway disconnected."""
    try:
        yield
    except asyncio.CancelledError:
        raise Cancelled("the client disconnected") from None
