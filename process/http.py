"""The HTTP side of a node: the endpoints that both roles have, and a server on a port the kernel may choose."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import ClientDisconnect

from process.address import host_port
from protocol.errors import Cancelled, ConfigError, InvalidRequest, KvferryError
from protocol.version import VERSION
from protocol.wire import unpack

T = TypeVar("T")


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket; port 0 lets the kernel choose. Raises ConfigError naming the remedy."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host_port(host, port)}: {error.strerror}; choose another --port", param="port"
        ) from error
    return sock


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process decides what a signal means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: FastAPI) -> Server:
    """A server for `app`; run it with `await server.serve(sockets=[sock])`, end it with `server.should_exit = True`."""
    return Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2))


def make_app(health: Callable[[], tuple[int, dict[str, object]]], ready: Callable[[], bool]) -> FastAPI:
    """/health, /ready and /version, and errors in the OpenAI shape. `/metrics` is added by `serve_metrics`."""
    app = FastAPI(openapi_url=None)

    @app.exception_handler(KvferryError)
    async def failed(_: Request, error: KvferryError) -> JSONResponse:
        return JSONResponse(error.body(), status_code=error.status)

    @app.get("/health")
    async def get_health() -> JSONResponse:
        status, body = health()
        return JSONResponse(body, status_code=status)

    @app.get("/ready")
    async def get_ready() -> JSONResponse:
        return JSONResponse({"ready": ready()}, status_code=200 if ready() else 503)

    @app.get("/version")
    async def get_version() -> dict[str, str]:
        return {"version": VERSION}

    return app


def serve_metrics(app: FastAPI, registry: CollectorRegistry, refresh: Callable[[], None]) -> None:
    """`GET /metrics` in Prometheus' text format; `refresh` sets the gauges first."""

    @app.get("/metrics")
    async def get_metrics() -> Response:
        refresh()
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


async def read_message(request: Request, cls: type[T]) -> T:
    """The message in a request's body. Raises InvalidRequest, Cancelled when its sender leaves meanwhile."""
    try:
        message = unpack(await request.body())
    except ClientDisconnect as error:
        raise Cancelled("the sender went away before its message was read") from error
    if not isinstance(message, cls):
        raise InvalidRequest(f"the body must be a {cls.__name__}, got a {type(message).__name__}", param="body")
    return message
