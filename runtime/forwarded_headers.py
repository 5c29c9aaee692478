"""ForwardedHeaders: leaves the headers of reverse proxies to uvicorn's middleware, for requests that have some."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

_PREFIX = b"x-forwarded-"


class ForwardedHeaders:
    """ASGI middleware around uvicorn's, which would search the headers of every request of a trusted client twice."""

    def __init__(self, uvicorns: ProxyHeadersMiddleware) -> None:
        self._uvicorns, self._app = cast(ASGIApp, uvicorns), cast(ASGIApp, uvicorns.app)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Return the application's coroutine."""
        for name, _ in scope.get("headers", ()):
            if name.startswith(_PREFIX):
                return self._uvicorns(scope, receive, send)
        return self._app(scope, receive, send)


def lighten_proxy_headers(config: uvicorn.Config) -> None:
    """Replace uvicorn's middleware in a loaded configuration, if it has one."""
    if isinstance(config.loaded_app, ProxyHeadersMiddleware):
        config.loaded_app = ForwardedHeaders(config.loaded_app)
