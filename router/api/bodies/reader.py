"""BodyReader: reads request bodies within a memory bound; `parsed` and `build` validate their JSON."""

from __future__ import annotations

import time
from collections import Counter
from io import BytesIO
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from kvferry.protocol.errors import Cancelled, InvalidRequest, Overloaded, RequestTooLarge, UnsupportedMedia
from kvferry.router.api.bodies.fields import field_path
from kvferry.router.api.bodies.parse_pacing import (
    LONG_BYTES,
    LONG_S,
    MAX_OBJECTS,
    MAX_VALUES,
    ParsePacing,
    cost_s,
    counted,
    measured_s,
)
from kvferry.router.api.bodies.request_body import RequestBody
from kvferry.router.api.bodies.sliced_json import (
    MAX_FIELDS,
    SlicedJson,
    TooManyFields,
    TooManyObjects,
    objects_in,
)
from kvferry.router.long_work import SOURCE, paced
from kvferry.router.request_context import CALL
from kvferry.runtime.disconnect import until_disconnect

MAX_BODIES, MAX_PER_SOURCE = 8, 4
"""Bounds of all arriving bodies, and of those of one tenant (or address), as multiples of the longest body."""
RESERVED_BODIES, SMALL_SHARE = 1, 1 / 16
"""Room beyond MAX_BODIES for small sources, and what a small source holds, as multiples of the longest body."""

ARRIVAL_BYTE_S = 2e-9
"""CPU time for each byte of a body that arrives, in seconds."""
READ_AT = "kvferry.read_at"
"""Key in the ASGI scope for the time when the body was read and admitted, in seconds of the monotonic clock."""

_BOM = b"\xef\xbb\xbf"
"""UTF-8 byte order mark, which some clients send."""

Body = TypeVar("Body", bound=RequestBody)


def check_encoding(request: Request) -> None:
    """Raise UnsupportedMedia for a compressed body, since it may expand to any length."""
    _check_encoding(request.headers.get("content-encoding", ""))


def _check_encoding(given: str) -> None:
    encoding = given.strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMedia(f"content-encoding: compressed bodies are not supported, got {encoding!r}")


class BodyReader:
    """Reader of all request bodies of a router; `longest` is the limit of one, in bytes."""

    def __init__(self, longest: int) -> None:
        self._longest, self._small = longest, min(longest, LONG_BYTES)
        self._held = Counter[str]()
        """Bytes of arriving bodies by source."""
        self._all = 0
        self._pace = ParsePacing()

    async def read(self, request: Request) -> bytes:
        """Return the request's body once it may be parsed; see `take`."""
        return await self.take(request.scope, request.receive)

    async def take(self, scope: Scope, receive: Receive) -> bytes:
        """Return a request's body once it may be parsed.

        Raises UnsupportedMedia; RequestTooLarge, already by its header; Overloaded while too many bytes arrive;
        Cancelled if the client leaves."""
        SOURCE.set(_source(scope))
        headers = dict(scope["headers"])
        if b"content-encoding" in headers:
            for given in [value for name, value in scope["headers"] if name == b"content-encoding"]:
                _check_encoding(given.decode("latin-1"))
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._longest:
            raise self._too_large()
        message = await receive()
        body: bytes = message.get("body", b"")
        if self._held or message["type"] != "http.request" or message.get("more_body") or len(body) >= self._small:
            return await self._collected(message, scope, receive)
        scope[READ_AT] = time.monotonic()
        return body

    async def _collected(self, message: Message, scope: Scope, receive: Receive) -> bytes:
        """Return a body that begins with this message, and is long or arrives in parts or beside others."""
        arrived, size, source = BytesIO(), 0, SOURCE.get()
        try:
            while True:
                if message["type"] == "http.disconnect":
                    raise Cancelled("the client disconnected")
                part = message.get("body", b"")
                size += len(part)
                self._held[source] += len(part)
                self._all += len(part)
                if size > self._longest:
                    raise self._too_large()
                own, room = self._held[source] / self._longest, MAX_BODIES - self._all / self._longest
                if own > MAX_PER_SOURCE or room < (-RESERVED_BODIES if own <= SMALL_SHARE else 0):
                    raise Overloaded("too many large request bodies are arriving", retry_after=1.0)
                arrived.write(part)
                if size >= LONG_BYTES:  # meanwhile the connection is not read
                    await paced(len(part) * ARRIVAL_BYTE_S)
                if not message.get("more_body", False):
                    break
                message = await receive()
            data = arrived.getvalue()  # without a copy
            if size >= LONG_BYTES:
                await until_disconnect(receive, self._pace.turn(await measured_s(data), source))
            scope[READ_AT] = time.monotonic()
            return data
        finally:
            self._held[source] -= size
            self._all -= size
            if not self._held[source]:
                del self._held[source]

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(
            f"the request body is longer than {self._longest} bytes; --max-body-mib of the router sets this bound"
        )


def _source(scope: Scope) -> str:
    """Return the source that a request's bytes count for: its tenant, or its address if clients need no key."""
    tenant: str = scope[CALL].tenant
    return tenant or (scope.get("client") or ("",))[0]


def parse(kind: type[Body], data: bytes) -> Body:
    """Parse a JSON body; raise InvalidRequest naming the first invalid field."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise _too_many_values()
    try:
        value = from_json(data.removeprefix(_BOM))
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    if data.count(b"[") + data.count(b"{") > MAX_OBJECTS and objects_in(value, MAX_OBJECTS) > MAX_OBJECTS:
        raise _too_many_objects()
    return build(kind, value)


async def parsed(kind: type[Body], data: bytes) -> Body:
    """Parse a JSON body as `parse` does; a long one in slices, between which other requests run."""
    if len(data) < LONG_BYTES:
        return parse(kind, data)
    values, objects, lists = await counted(data)
    if cost_s(len(data), values, objects) < LONG_S:
        return parse(kind, data)
    if values + objects + lists > MAX_VALUES:
        raise _too_many_values()
    try:
        value = await SlicedJson(data.removeprefix(_BOM), MAX_OBJECTS).value()
    except TooManyObjects:
        raise _too_many_objects() from None
    except TooManyFields:
        raise InvalidRequest(f"an object of the request body has more than {MAX_FIELDS} fields") from None
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    return build(kind, value)


def _too_many_values() -> InvalidRequest:
    return InvalidRequest(f"the request body holds more than {MAX_VALUES} values")


def _too_many_objects() -> InvalidRequest:
    return InvalidRequest(f"the request body holds more than {MAX_OBJECTS} lists and objects")


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
