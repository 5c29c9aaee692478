"""Every error of the HTTP side as an OpenAI error object, those of the framework included."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from protocol.errors import InvalidRequest, KvferryError, NotFound
from router.api.sse import dump
from router.call import CALL

logger = logging.getLogger(__name__)

RETRY_AFTER_S = {429: 1.0, 503: 5.0}
"""A place is free again after about a token's time, a node after its restart."""


class MethodNotAllowed(InvalidRequest):
    """The path exists, but not with this method."""

    status, code = 405, "method_not_allowed"


def retry_headers(status: int, seconds: float | None = None) -> dict[str, str]:
    """Retry-After in whole seconds, for the statuses that ask a client to come back; without `seconds` what suits the
    status."""
    if status not in RETRY_AFTER_S:
        return {}
    return {"retry-after": str(max(1, math.ceil(RETRY_AFTER_S[status] if seconds is None else seconds)))}


def error_headers(error: KvferryError) -> dict[str, str]:
    return retry_headers(error.status, error.retry_after)


def error_response(error: KvferryError) -> Response:
    return Response(dump(error.body()), error.status, error_headers(error), "application/json")


async def _own(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvferryError)
    return error_response(error)


async def _framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(_translated(error, request))
    response.headers.update(error.headers or {})
    return response


async def _unexpected(request: Request, error: Exception) -> Response:
    call = request.scope[CALL].id
    logger.error("%s: %s %s failed", call, request.method, request.url.path, exc_info=error)
    return error_response(KvferryError("internal error of the router; its log has the details"))


HANDLERS: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    KvferryError: _own,
    HTTPException: _framework,
    Exception: _unexpected,
}
"""What makes the application answer every error in the API's shape."""


def _translated(error: HTTPException, request: Request) -> KvferryError:
    place = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return NotFound(f"no such route: {place}")
    if error.status_code == 405:
        return MethodNotAllowed(f"method not allowed: {place}")
    return InvalidRequest(str(error.detail))
