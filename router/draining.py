"""Answers new connections of a draining router: status for probes, metrics, and rejections of requests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from kvferry.protocol.errors import Draining
from kvferry.runtime.connection_limits import Limits
from kvferry.runtime.connections import guarded
from kvferry.runtime.http import Server, make_app
from kvferry.runtime.rejection import retry_headers

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


@contextlib.asynccontextmanager
async def answering(
    sock: socket.socket, draining: Server, scrape: Callable[[], Awaitable[bytes]], tls: dict[str, Any], limits: Limits
) -> AsyncIterator[None]:
    """Answer new connections on the listening socket while its server is `draining`.

    No connection is refused at the transition. The socket's last owner closes it. `scrape` returns the metrics."""
    config = uvicorn.Config(
        _app(scrape), **tls, http=guarded(limits), ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, timeout_graceful_shutdown=1,
    )  # fmt: skip
    config.load()
    server = Server(config, handshake_s=limits.header_s)
    duplicate = sock.dup()

    async def serve() -> None:
        while any(each.is_serving() for each in draining.servers):  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        await server.serve(sockets=[duplicate])

    serving = asyncio.create_task(serve())
    try:
        yield
    finally:
        server.should_exit = True
        if not server.started:
            serving.cancel()
        await asyncio.wait((serving,))
        duplicate.close()


def _app(scrape: Callable[[], Awaitable[bytes]]) -> FastAPI:
    """Return an application that is alive, not ready, and scrapable, and that rejects all other requests."""
    app = make_app(lambda: (200, {"status": "draining"}), lambda: "it is draining")

    @app.get("/metrics")
    async def scraped() -> Response:
        return Response(await scrape(), media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/{path:path}", methods=METHODS)
    async def refuse(path: str) -> Response:
        error = Draining("this router is draining and takes no new requests")
        return JSONResponse(error.body(), error.status, {**retry_headers(error.status), "connection": "close"})

    return app
