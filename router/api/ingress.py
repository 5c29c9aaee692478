"""Ingress: outermost ASGI layer; authenticates requests, creates their RequestContext, delays repeated rejections."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Mapping, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.protocol.errors import Unauthorized
from kvferry.protocol.sessions import session_name
from kvferry.protocol.settings import RouterSettings
from kvferry.router.api.bodies.reader import READ_AT
from kvferry.router.api.http_errors import error_response
from kvferry.router.api.path_aliases import canonical
from kvferry.router.request_context import CALL, NO_RESUME, RequestContext, ResumeHeaders
from kvferry.router.tenants.tenant import Tenant
from kvferry.router.tenants.tenant_registry import TenantRegistry
from kvferry.runtime.log import REQUEST
from kvferry.runtime.rejection_throttle import RejectionThrottle
from kvferry.runtime.request_path import Root

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/metrics", "/dashboard"))
"""Paths that need no API key."""
NO_KEY = "missing or wrong API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Ingress:
    """ASGI middleware that authenticates requests, stores their RequestContext in the scope, and adds x-request-id.

    With API keys, clients must present one outside OPEN_PATHS; it identifies the tenant. A POST to one of `exchanges`
    goes to it directly, since each layer of routing would cost time for every token. Clients with too many rejected
    requests are throttled."""

    def __init__(
        self,
        app: ASGIApp,
        settings: RouterSettings,
        tenant_registry: TenantRegistry,
        exchanges: Mapping[str, ASGIApp],
        throttle: RejectionThrottle | None = None,
    ) -> None:
        self._app = app
        self._exchanges = exchanges
        self._tenant_registry, self._throttle = tenant_registry, throttle
        self._timeout_s = settings.request_timeout
        self._root = Root(settings.root_path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given, scope = self._root.local(scope)
        if (path := canonical(given)) != given:
            scope = {**scope, "path": scope["path"].removesuffix(given) + path}
        tenant, call = self._introduced(scope)

        def stamped(message: Message) -> Awaitable[None]:
            if message["type"] != "http.response.start":
                return send(message)
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", call.id.encode())]
            if message["status"] >= 400 and self._throttle is not None:
                return self._rejected(scope, message, call, send)
            if self._throttle is not None and scope["method"] == "POST":
                self._throttle.served()
            return send(message)

        REQUEST.set(call.id)
        if tenant is None and path not in OPEN_PATHS:
            response = error_response(Unauthorized(NO_KEY), path)
            response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, stamped)
            return
        exchange = self._exchanges.get(path) if scope["method"] == "POST" else None
        await (exchange or self._app)(scope, receive, stamped)

    def _introduced(self, scope: Scope) -> tuple[Tenant | None, RequestContext]:
        """Return a request's tenant, None if it needs one, and its context, which is then in its scope."""
        headers = by_name(scope["headers"])
        tenant = self._tenant_registry.keyring.presented(headers)
        name = tenant.name if tenant else ""
        call = scope[CALL] = new_call(headers, name, self._tenant_registry.realm(name), self._timeout_s)
        return tenant, call

    async def _rejected(self, scope: Scope, message: Message, call: RequestContext, send: Send) -> None:
        """Begin a response with an error, later if its client has had too many rejections."""
        assert self._throttle is not None
        if message["status"] < 500:
            took_s = time.monotonic() - scope.get(READ_AT, call.arrival)
            if delay_s := self._throttle.delay_s(call.tenant or (scope.get("client") or ("",))[0], took_s):
                await asyncio.sleep(delay_s)
        await send(message)


def by_name(headers: Sequence[tuple[bytes, bytes]]) -> Mapping[str, str]:
    """Return headers by their names in lower case; the first one if a name occurs several times."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(headers)}


def new_call(headers: Mapping[str, str], tenant: str, realm: str, timeout_s: float) -> RequestContext:
    """Return the context of a request that arrives now, with the client's id and trace if they are well formed."""
    given, arrival = headers.get("x-request-id", ""), time.monotonic()
    return RequestContext(
        given if _SANE_ID.fullmatch(given) else secrets.token_hex(16),
        arrival=arrival,
        deadline=arrival + timeout_s,
        tenant=tenant,
        realm=realm,
        trace=_traceparent(headers),
        session=session_name(tenant, headers.get("x-session-id", "")),
        resume=_resume(headers),
    )


def _resume(headers: Mapping[str, str]) -> ResumeHeaders:
    """Return the headers with which a client resumes a stream."""
    key, after = headers.get("idempotency-key", ""), headers.get("last-event-id", "")
    reads_ids = bool(key or after) or "text/event-stream" in headers.get("accept", "")
    return ResumeHeaders(key, after, reads_ids) if reads_ids else NO_RESUME


def _traceparent(headers: Mapping[str, str]) -> str:
    """Return the client's traceparent if it is valid, else an empty string."""
    given = headers.get("traceparent", "")
    return given if given and _TRACEPARENT.fullmatch(given) else ""
