"""gRPC servers of an endpoint picker: Envoy's external processing, and health checks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvferry.endpoint_picker.exchange import Exchange, ResponseCut
from kvferry.endpoint_picker.ext_proc import METHOD, ProcessingRequest, ProcessingResponse
from kvferry.endpoint_picker.incoming import Incoming, ProtocolError
from kvferry.endpoint_picker.services import Services
from kvferry.protocol.common_settings import CommonSettings
from kvferry.protocol.errors import ConfigError, reason
from kvferry.runtime.address import host_port
from kvferry.runtime.tls import server_tls

log = logging.getLogger(__name__)

READY_SERVICES = ("", "readiness", METHOD[0])
"""Health services that report whether requests are accepted."""
LIVENESS = "liveness"
"""Health service that reports whether the process runs."""
CHECK_INTERVAL_S = 0.2
"""Interval between checks of readiness, in seconds."""
KEEPALIVE_S = 20.0
"""Silence of a gateway's connection after which a keepalive ping is sent, in seconds."""
SPARE_STREAMS = 64
"""Streams beyond twice the requests in progress, so that excess requests can wait or be refused with a status."""
SPARE_BYTES = 1 << 20
"""Bytes of a message besides its body."""


class ExternalProcessor:
    """Servicer of `envoy.service.ext_proc.v3.ExternalProcessor`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def handler(self) -> Any:
        """Return the handler for a server."""
        method = grpc.stream_stream_rpc_method_handler(
            self.process,
            request_deserializer=ProcessingRequest.FromString,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(METHOD[0], {METHOD[1]: method})

    async def process(self, requests: AsyncIterator[Any], context: Any) -> None:
        """Serve one stream, which is one request."""
        incoming = Incoming(requests)
        try:
            await Exchange(self._services, incoming, context.write).run()
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except ResponseCut as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        finally:
            incoming.close()


class HealthStates:
    """States that health checks and watchers see, kept by `follow`."""

    def __init__(self, trouble: Callable[[], str]) -> None:
        self.servicer = health.aio.HealthServicer()
        self._trouble, self._shown, self.draining = trouble, "not looked yet", False

    async def follow(self) -> None:
        """Keep the states; never returns."""
        await self.servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        while True:
            await self.show()
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def drain(self) -> None:
        """Show that no requests are accepted any more."""
        self.draining = True
        await self.show()

    async def show(self) -> None:
        """Update the states after a change."""
        unready_reason = self.unready_reason()
        if unready_reason == self._shown:
            return
        self._shown = unready_reason
        states = health_pb2.HealthCheckResponse
        for name in READY_SERVICES:
            await self.servicer.set(name, states.NOT_SERVING if unready_reason else states.SERVING)

    def unready_reason(self) -> str:
        """Return why no requests are accepted; empty if they are."""
        return "it is draining" if self.draining else self._trouble()


class GrpcServer:
    """A gRPC server on one port.

    options: of the server; streams: maximum concurrent calls; more end with RESOURCE_EXHAUSTED."""

    def __init__(self, streams: int, options: dict[str, int]) -> None:
        self._server = grpc.aio.server(maximum_concurrent_rpcs=streams, options=[*options.items()])

    def add(self, handler: Any) -> None:
        """Serve a generic handler."""
        self._server.add_generic_rpc_handlers((handler,))

    def add_health(self, states: HealthStates) -> None:
        """Serve health checks."""
        health_pb2_grpc.add_HealthServicer_to_server(states.servicer, self._server)

    async def start(self, host: str, port: int, credentials: Any, flag: str) -> int:
        """Listen and return the port; raise ConfigError, which names the flag."""
        address = host_port(host, port)
        try:
            if credentials is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: {reason(error)}; choose another --{flag}") from error
        await self._server.start()
        return int(bound)

    async def stop(self, grace_s: float) -> None:
        """Accept no more calls, and end those in progress within the grace period."""
        await self._server.stop(grace_s)


def processing_server(services: Services, states: HealthStates) -> GrpcServer:
    """Return the server that gateways call."""
    settings = services.settings
    server = GrpcServer(
        2 * settings.max_inflight + SPARE_STREAMS,
        {
            "grpc.so_reuseport": 0,
            "grpc.max_receive_message_length": settings.max_body_mib * 2**20 + SPARE_BYTES,
            "grpc.keepalive_time_ms": round(1000 * KEEPALIVE_S),
            "grpc.http2.min_ping_interval_without_data_ms": 5000,
        },
    )
    server.add(ExternalProcessor(services).handler())
    server.add_health(states)
    return server


def health_server(states: HealthStates) -> GrpcServer:
    """Return the server that only answers health checks."""
    server = GrpcServer(SPARE_STREAMS, {"grpc.so_reuseport": 0})
    server.add_health(states)
    return server


def credentials(settings: CommonSettings) -> Any:
    """Return the server's TLS credentials, or None without a certificate; raise ConfigError."""
    files = server_tls(settings)
    if not files:
        return None
    try:
        read = {name: _read(path) for name, path in files.items() if name != "ssl_cert_reqs"}
    except OSError as error:
        raise ConfigError(f"--ssl-certfile, --ssl-keyfile or --ssl-ca-certs: {reason(error)}") from error
    certificate, authorities = read["ssl_certfile"], read["ssl_ca_certs"]
    pair = (read["ssl_keyfile"] or certificate, certificate)
    return grpc.ssl_server_credentials([pair], authorities, authorities is not None)


def _read(path: str | None) -> bytes | None:
    if not path:
        return None
    with open(path, "rb") as file:
        return file.read()
