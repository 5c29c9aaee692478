"""Routes GET <endpoint>/{id} that resume recorded chats and completions; events_after does so for responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.api.answer_base import Endpoint
from kvferry.router.api.documentation import STREAMED, errors, path_parameter
from kvferry.router.request_context import CALL, ResumeHeaders

MAX_NUMBER = 10**9
"""Largest accepted event number."""


class Exchanged(Response):
    """Response that delegates to a route which reads and writes for itself."""

    def __init__(self, exchange: ASGIApp) -> None:
        super().__init__()
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._exchange(scope, receive, send)


def resumed_routes(
    endpoints: Iterable[Endpoint], exchanges: Mapping[str, ASGIApp], statuses: Sequence[int]
) -> APIRouter:
    """Return the routes of OpenAI's endpoints whose events have ids; `statuses` are those of their errors."""
    router = APIRouter()
    for endpoint in endpoints:
        if endpoint.singly:
            continue
        described = path_parameter("id")
        described["parameters"].append({"name": "Last-Event-ID", "in": "header", "schema": {"type": "string"}})
        router.get(
            endpoint.path + "/{id}",
            summary="Take up a recorded answer again",
            response_model=endpoint.answer,
            responses={**STREAMED, **errors(*statuses, 404, 409, 422, model=endpoint.error)},
            openapi_extra=described,
        )(_resume_route(exchanges[endpoint.path]))
    return router


def _resume_route(exchange: ASGIApp) -> Callable[[Request], Awaitable[Response]]:
    async def take_up(request: Request) -> Response:
        resume = request.scope[CALL].resume
        streams = "text/event-stream" in request.headers.get("accept", "")
        return resumed_response(request, exchange, replace(resume, name=request.path_params["id"], streams=streams))

    return take_up


def events_after(request: Request, exchange: ASGIApp) -> Response:
    """Return the events of a response after number `starting_after`; raise InvalidRequest."""
    given = request.query_params.get("starting_after", "-1")
    if given != "-1" and not (given.isascii() and given.isdigit() and int(given[:12]) <= MAX_NUMBER):
        raise InvalidRequest(f"starting_after must be a number up to {MAX_NUMBER}", param="starting_after")
    resume = ResumeHeaders(name=request.path_params["id"], number=int(given), streams=True)
    return resumed_response(request, exchange, resume)


def resumed_response(request: Request, exchange: ASGIApp, resume: ResumeHeaders) -> Response:
    """Return the response of the endpoint's route, which then sends the recorded answer."""
    scope = request.scope
    scope[CALL] = replace(scope[CALL], resume=resume)
    return Exchanged(exchange)
