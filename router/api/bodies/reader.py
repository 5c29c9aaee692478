"""Reading and parsing of request bodies within a memory bound."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from kvferry.protocol.errors import Cancelled, InvalidRequest, Overloaded, RequestTooLarge, UnsupportedMedia
from kvferry.router.api.bodies.fields import field_path
from kvferry.router.api.bodies.generating import RequestBody
from kvferry.router.api.bodies.parse_pacing import LONG_BYTES, ParsePacing, cost_s

MAX_VALUES = 2**20
"""Strings, numbers, lists and objects in one body: reading them keeps the event loop busy, 0.1 to 0.2 s for so many."""
MAX_OBJECTS = 2**15
"""Lists and objects among them: most of them are looked at, one by one."""
AT_ONCE = 32
"""As many of the longest bodies may be arriving at the same time."""

READ_AT = "kvferry.read_at"
"""Key in a request's ASGI scope of when its body was read, and its turn had come: seconds of the monotonic clock."""

_BOM = b"\xef\xbb\xbf"
"""What some clients write in front of UTF-8."""

Body = TypeVar("Body", bound=RequestBody)


def check_encoding(request: Request) -> None:
    """Raise UnsupportedMedia for a body that is compressed: a short one may be of any length."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMedia(f"content-encoding: bodies are read as they are, not in {encoding!r}")


class BodyReader:
    """Body reader of one router; `longest` is in bytes."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._held = 0
        self._pace = ParsePacing()

    async def read(self, request: Request) -> bytes:
        """The request's body, once it may be parsed.

        Raises UnsupportedMedia; RequestTooLarge, as soon as the header says so; Overloaded when too much is arriving;
        Cancelled when the client leaves meanwhile."""
        check_encoding(request)
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
            data = b"".join(parts)
            if size >= LONG_BYTES:
                await self._pace.turn(cost_s(data))
            request.scope[READ_AT] = time.monotonic()
            return data
        except ClientDisconnect as error:
            raise Cancelled("the client went away") from error
        finally:
            self._held -= size

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"the request body is longer than {self._longest} bytes")


def parse(kind: type[Body], data: bytes) -> Body:
    """The body that `data` spells in JSON. Raises InvalidRequest naming the first field at fault."""
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
    """How many lists and objects a JSON value is made of; those in excess of MAX_OBJECTS are not looked for.

    Brackets in its texts are none."""
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
    """The body that a JSON value is. Raises InvalidRequest naming the first field at fault."""
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
