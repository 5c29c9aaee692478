"""Bodies of requests, read within the memory that a router has for them."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from protocol.errors import Cancelled, Overloaded, RequestTooLarge

AT_ONCE = 32
"""As many of the longest bodies may be arriving at the same time."""


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
