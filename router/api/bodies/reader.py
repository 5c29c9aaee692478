"""Reading and parsing of request bodies within a memory bound."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from kvferry.protocol.errors import Cancelled, InvalidRequest, Overloaded, RequestTooLarge, UnsupportedMedia
from kvferry.router.api.bodies.fields import field_path
from kvferry.router.api.bodies.parse_pacing import LONG_BYTES, ParsePacing, cost_s
from kvferry.router.api.bodies.request_body import RequestBody
from kvferry.router.request_context import CALL

MAX_VALUES = 2**20
"""Largest number of values in a body; parsing that many keeps the event loop busy for 0.1 to 0.2 s."""
MAX_OBJECTS = 2**15
"""Largest number of lists and objects among the values, most of which are validated one by one."""
AT_ONCE, PER_SOURCE = 8, 4
"""Bounds of all arriving bodies, and of one tenant's (or one address's), as multiples of the longest body."""

READ_AT = "kvferry.read_at"
"""Key in the ASGI scope for the time when the body was read and admitted, in seconds of the monotonic clock."""

_BOM = b"\xef\xbb\xbf"
"""UTF-8 byte order mark, which some clients send."""

Body = TypeVar("Body", bound=RequestBody)


def check_encoding(request: Request) -> None:
    """Raise UnsupportedMedia for a compressed body, since it may expand to any length."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMedia(f"content-encoding: compressed bodies are not supported, got {encoding!r}")


class BodyReader:
    """Reader of all request bodies of a router; `longest` is the limit of one, in bytes."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._held = Counter[str]()
        """Bytes of arriving bodies by source."""
        self._pace = ParsePacing()

    async def read(self, request: Request) -> bytes:
        """Return the request's body once it may be parsed.

        Raises UnsupportedMedia; RequestTooLarge, already by its header; Overloaded while too many bytes arrive;
        Cancelled if the client leaves."""
        check_encoding(request)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._longest:
            raise self._too_large()
        parts, size, source = [], 0, _source(request)
        try:
            async for part in request.stream():
                size += len(part)
                self._held[source] += len(part)
                if size > self._longest:
                    raise self._too_large()
                if self._held[source] > PER_SOURCE * self._longest or self._held.total() > AT_ONCE * self._longest:
                    raise Overloaded("too many large request bodies are arriving", retry_after=1.0)
                parts.append(part)
            data = b"".join(parts)
            if size >= LONG_BYTES:
                await self._pace.turn(cost_s(data))
            request.scope[READ_AT] = time.monotonic()
            return data
        except ClientDisconnect as error:
            raise Cancelled("the client disconnected") from error
        finally:
            self._held[source] -= size
            if not self._held[source]:
                del self._held[source]

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"the request body is longer than {self._longest} bytes")


def _source(request: Request) -> str:
    """Return whose bytes a request's are: its tenant, or its address where clients need no key."""
    return request.scope[CALL].tenant or (request.client.host if request.client else "")


def parse(kind: type[Body], data: bytes) -> Body:
    """Parse a JSON body; raise InvalidRequest naming the first invalid field."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise InvalidRequest(f"the request body holds more than {MAX_VALUES} values")
    try:
        value = from_json(data.removeprefix(_BOM))
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    if data.count(b"[") + data.count(b"{") > MAX_OBJECTS and _objects(value) > MAX_OBJECTS:
        raise InvalidRequest(f"the request body holds more than {MAX_OBJECTS} lists and objects")
    return build(kind, value)


def _objects(value: Any) -> int:
    """Count the lists and objects of a JSON value, up to just above MAX_OBJECTS.

    Counting brackets in the text would include those in strings."""
    found, waiting = 0, [value]
    while waiting and found <= MAX_OBJECTS:
        items = waiting.pop()
        if isinstance(items, dict):
            items = items.values()
        elif not isinstance(items, list):
            continue
        found += 1
        waiting += [item for item in items if isinstance(item, list | dict)]
    return found


def build(kind: type[Body], value: Any) -> Body:
    """Build a body from a JSON value; raise InvalidRequest naming the first invalid field."""
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if not first["loc"]:
            raise InvalidRequest("the request body must be a JSON object") from None
        param = field_path(first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{param}: {reason}", param=param) from None
    body.check()
    return body
