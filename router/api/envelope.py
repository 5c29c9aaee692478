"""Around every request: the bearer token, and a request id on every response."""

from __future__ import annotations

import hmac
import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.errors import Unauthorized
from router.api.http_errors import error_response

OPEN_PATHS = frozenset(("/health", "/ready", "/metrics"))
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Envelope:
    """ASGI middleware. `api_key`: what clients must present outside OPEN_PATHS; empty: nothing."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        if self._key and scope["path"] not in OPEN_PATHS and not self._known(headers.get("authorization", "")):
            response = error_response(Unauthorized("missing or wrong API key; send it as 'Authorization: Bearer KEY'"))
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, stamped)
            return
        await self._app(scope, receive, stamped)

    def _known(self, authorization: str) -> bool:
        """Header values arrive decoded as latin-1; the key is compared in bytes, in constant time."""
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode("latin-1"), self._key)
