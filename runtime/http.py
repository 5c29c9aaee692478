"""HTTP server of a node: sockets, uvicorn server, FastAPI app with status endpoints, and reading of messages."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Container, Iterator, Sequence
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import ClientDisconnect

from kvferry.protocol.errors import Cancelled, ConfigError, InvalidRequest, KvferryError, RequestTooLarge
from kvferry.protocol.version import VERSION
from kvferry.protocol.wire import MAX_FRAME_BYTES, FrameReader, unpack
from kvferry.runtime.address import family_of, host_port
from kvferry.runtime.cluster_secret import MembersOnly
from kvferry.runtime.connection_limits import Limits
from kvferry.runtime.connections import guarded
from kvferry.runtime.forwarded_headers import lighten_proxy_headers
from kvferry.runtime.rejection import retry_headers
from kvferry.runtime.tls import load

T = TypeVar("T")

HANDSHAKE_S = 5.0
"""Maximum time of a TLS handshake with a worker, in seconds."""


def bind(host: str, port: int, shared: bool = False) -> socket.socket:
    """Return a bound TCP socket; port 0 lets the kernel choose.

    shared: sets SO_REUSEPORT, so that the kernel spreads connections over all sockets that set it. A socket that is
    bound without it, and does not listen, keeps the port from other programs. Raises ConfigError, which names the
    remedy."""
    family, address = family_of(host)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((address, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host_port(host, port)}: {error.strerror}; choose another --port", param="port"
        ) from error
    return sock


class Server(uvicorn.Server):
    """uvicorn on sockets that are already bound, without its signal handlers: the process handles signals itself.

    handshake_s: maximum time of a TLS handshake in seconds; 0: asyncio's default, 60 s."""

    def __init__(self, config: uvicorn.Config, handshake_s: float = 0.0) -> None:
        super().__init__(config)
        self._handshake_s = handshake_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the bound sockets."""
        lighten_proxy_headers(self.config)
        config, limits = self.config, dict[str, Any]()
        self.servers = []
        if config.ssl is not None and self._handshake_s:
            limits = {"ssl_handshake_timeout": self._handshake_s, "ssl_shutdown_timeout": min(5.0, self._handshake_s)}
        for sock in sockets or ():
            server = await asyncio.get_running_loop().create_server(
                self._connection, sock=sock, ssl=config.ssl, backlog=config.backlog, **limits
            )
            self.servers.append(server)
        self.started = True

    def _connection(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol


def make_server(app: FastAPI, tls: dict[str, Any]) -> Server:
    """Return a server for `app`; tls: uvicorn's options (`runtime.tls`). Raises ConfigError if they cannot be used.

    Run it with `await server.serve(sockets=[sock])`; end it with `server.should_exit = True`."""
    limits = Limits(body_bytes=MAX_FRAME_BYTES)
    config = uvicorn.Config(
        app, **tls, http=guarded(limits), ws="none", log_config=None, access_log=False, lifespan="off",
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    return Server(load(config), handshake_s=HANDSHAKE_S)


def make_app(
    health: Callable[[], tuple[int, dict[str, object]]],
    unready: Callable[[], str],
    tokens: Callable[[], Sequence[str]] | None = None,
    keyed: Container[str] = (),
) -> FastAPI:
    """Return an application with /health, /ready and /version, and errors in the OpenAI format.

    `serve_metrics` adds `/metrics`.

    health    returns the status code and body of /health
    unready   returns the reason why the node takes no work; empty if it takes work
    tokens    returns the accepted tokens; a request must carry one, except on those paths and /metrics
              (runtime/cluster_secret.py); None: no check
    keyed     paths that check an API key instead
    """
    app = FastAPI(openapi_url=None)
    if tokens is not None:
        app.add_middleware(MembersOnly, tokens=tokens, keyed=keyed)

    @app.exception_handler(KvferryError)
    async def failed(_: Request, error: KvferryError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, retry_headers(error.status, error.retry_after))

    @app.get("/health")
    async def get_health() -> JSONResponse:
        status, body = health()
        return JSONResponse(body, status_code=status)

    @app.get("/ready")
    async def get_ready() -> JSONResponse:
        """Return the readiness, the reason if the node is not ready, and the health body."""
        why = unready()
        ready = {"ready": False, "reason": why} if why else {"ready": True}
        return JSONResponse(ready | health()[1], status_code=503 if why else 200)

    @app.get("/version")
    async def get_version() -> dict[str, str]:
        return {"version": VERSION}

    return app


def serve_metrics(app: FastAPI, registry: CollectorRegistry, refresh: Callable[[], None]) -> None:
    """Add `GET /metrics` in Prometheus' text format; each scrape calls `refresh` first, which sets the gauges."""

    @app.get("/metrics")
    async def get_metrics() -> Response:
        refresh()
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


async def read_body(request: Request, longest: int) -> bytearray:
    """Return a request's body of at most `longest` bytes.

    Raises RequestTooLarge, or Cancelled if the sender disconnects meanwhile."""
    data = bytearray()
    async for part in _parts(request, longest):
        data += part
    return data


async def read_messages(request: Request) -> list[Any]:
    """Return the messages in a request's body one after the other, each parsed as soon as it has arrived.

    Raises WireError, RequestTooLarge, or Cancelled if the sender disconnects meanwhile."""
    reader, found = FrameReader(), list[Any]()
    async for part in _parts(request, MAX_FRAME_BYTES):
        found += reader.feed(part)
    return found


async def _parts(request: Request, longest: int) -> AsyncIterator[bytes]:
    """Yield the parts of a body as they arrive; see `read_body`."""
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > longest:
                raise RequestTooLarge(f"the message is longer than {longest} bytes", param="body")
            yield part
    except ClientDisconnect as error:
        raise Cancelled("the sender disconnected before its message was read") from error


async def read_message(request: Request, cls: type[T]) -> T:
    """Return the message in a request's body.

    Raises InvalidRequest, RequestTooLarge, or Cancelled if the sender disconnects meanwhile."""
    message = unpack(await read_body(request, MAX_FRAME_BYTES))
    if not isinstance(message, cls):
        raise InvalidRequest(f"the body must be a {cls.__name__}, got a {type(message).__name__}", param="body")
    return message
