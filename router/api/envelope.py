"""Around every request: the bearer token, the call that it is, and the call's id on every response."""

from __future__ import annotations

import hmac
import re
import time
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.errors import Unauthorized
from protocol.settings import RouterSettings
from router.api.http_errors import error_response
from router.call import Call

OPEN_PATHS = frozenset(("/health", "/ready", "/metrics"))
CALL = "kvferry.call"
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Envelope:
    """ASGI middleware: what it wraps finds the request's Call in the scope, under CALL. With an API key in the settings
    clients must present it outside OPEN_PATHS."""

    def __init__(self, app: ASGIApp, settings: RouterSettings) -> None:
        self._app = app
        self._key = settings.api_key.encode()
        self._timeout_s = settings.request_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given, arrival = headers.get("x-request-id", ""), time.monotonic()
        call = scope[CALL] = Call(
            given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex,
            arrival=arrival,
            deadline=arrival + self._timeout_s,
            trace=headers.get("traceparent", ""),
        )

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", call.id.encode())]
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
