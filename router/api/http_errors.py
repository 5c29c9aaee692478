"""Exception handlers that answer every error as an error object in OpenAI's format, or Anthropic's on its paths."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kvferry.protocol.errors import InvalidRequest, KvferryError, NotFound
from kvferry.router.api.messages import errors as messages
from kvferry.router.api.sse import dump, event, named_event
from kvferry.router.request_context import CALL
from kvferry.runtime.rejection import retry_headers

logger = logging.getLogger(__name__)


class MethodNotAllowed(InvalidRequest):
    """The path exists, but not with this method."""

    status, code = 405, "method_not_allowed"


def error_body(error: KvferryError, path: str) -> dict[str, Any]:
    """Return the body of an error, in Anthropic's format on its paths and in OpenAI's on all others."""
    if path == messages.PATH or path.startswith(messages.PATH + "/"):
        return messages.message_error(error)
    return error.body()


def error_event(error: KvferryError, path: str) -> bytes:
    """Return the last event of a stream that an error ends before its answer began, in the format of the path's API."""
    value = error_body(error, path)
    return named_event(value) if "type" in value else event(value)


def error_response(error: KvferryError, path: str) -> Response:
    """Return the HTTP response for an error, in the format of the path's API."""
    headers = retry_headers(error.status, error.retry_after)
    return Response(dump(error_body(error, path)), error.status, headers, "application/json")


def _local(request: Request) -> str:
    """Return the path without the proxy's root path."""
    root: str = request.scope.get("root_path", "")
    return request.url.path.removeprefix(root)


async def _own(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvferryError)
    return error_response(error, _local(request))


async def _framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(_translated(error, request), _local(request))
    response.headers.update(error.headers or {})
    return response


async def _unexpected(request: Request, error: Exception) -> Response:
    call = request.scope[CALL].id
    logger.error("%s: %s %s failed", call, request.method, request.url.path, exc_info=error)
    failed = KvferryError("internal error of the router; its log has the details")
    return error_response(failed, _local(request))


HANDLERS: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    KvferryError: _own,
    HTTPException: _framework,
    Exception: _unexpected,
}
"""Exception handlers that answer every error in the API's format."""


def _translated(error: HTTPException, request: Request) -> KvferryError:
    place = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return NotFound(f"no such route: {place}")
    if error.status_code == 405:
        return MethodNotAllowed(f"method not allowed: {place}")
    return InvalidRequest(str(error.detail))
