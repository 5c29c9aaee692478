"""Entry point of `kvferry epp`: starts and stops the endpoint picker."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
from typing import Any

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST

from kvferry.cluster_state.redis_store import RedisStore
from kvferry.cluster_state.seal import Seal
from kvferry.endpoint_picker.services import Services
from kvferry.protocol.epp_settings import EppSettings
from kvferry.protocol.errors import ConfigError, RegistryUnavailable
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.dispatch.cluster import RouterCluster, Store
from kvferry.router.main import GC_THRESHOLD, HURRY_S, SWITCH_S
from kvferry.router.tenants.tenant_registry import TenantRegistry
from kvferry.router.text.loader import load_text_models
from kvferry.router.worker_peers.exposition import scraped
from kvferry.router.worker_peers.peers import WorkerPeers
from kvferry.runtime.address import host_port
from kvferry.runtime.background import background
from kvferry.runtime.cluster_secret import ClusterSecrets
from kvferry.runtime.http import bind, make_app, make_server
from kvferry.runtime.limits import allow_descriptors
from kvferry.runtime.loop_lag import watched
from kvferry.runtime.signals import StopSignal
from kvferry.runtime.supervisor_status import SupervisorStatus
from kvferry.runtime.tls import worker_tls

log = logging.getLogger(__name__)

EXTRA = ("grpc", "grpc_health", "google")
"""Packages of the optional extra `epp`."""


async def serve_epp(settings: EppSettings) -> None:
    """Run an endpoint picker until SIGTERM or SIGINT.

    After SIGTERM its health says so first. It takes requests for `drain_delay` more seconds, and running ones may
    finish within `request_timeout`. SIGINT or a second signal ends it within HURRY_S. Raises ConfigError if the extra
    `epp` is not installed, or if a port, the model or Redis cannot be used. If Redis does not answer yet, it waits."""
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(GC_THRESHOLD)
    stop = StopSignal()
    stop.listen()
    allow_descriptors()
    secrets = ClusterSecrets(settings)
    seal = Seal(secrets.registry_keys)
    store = RedisStore(settings.redis_url, settings.cluster, password_file=settings.redis_password_file, seal=seal)
    try:
        with contextlib.suppress(RegistryUnavailable):
            await store.check()
        await run_epp(settings, secrets, store, stop)
    finally:
        await store.close()


async def run_epp(settings: EppSettings, secrets: ClusterSecrets, store: Store, stop: StopSignal) -> None:
    """Serve until `stop`."""
    service = _grpc_service()
    tenant_registry, metrics = TenantRegistry(settings), RouterMetrics()
    texts = await asyncio.to_thread(load_text_models, settings)
    nodes = RouterCluster(
        store, store, metrics, buddies=False, fetch=False, max_wait_s=settings.queue_timeout, token=secrets.token,
        tls=worker_tls(settings.worker_ca_certs, settings.worker_server_name), relayed=store.records,
    )  # fmt: skip
    services = Services.of(settings, texts, nodes, metrics, tenant_registry)
    states = service.HealthStates(services.trouble)
    tls = service.credentials(settings)
    server, health = service.processing_server(services, states), service.health_server(states)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(nodes)
        await stack.enter_async_context(contextlib.aclosing(services.models))
        for each in (secrets.followed(), tenant_registry.keyring.followed(), watched(metrics.loop)):
            await stack.enter_async_context(each)
        await stack.enter_async_context(background(states.follow(), "health"))
        await stack.enter_async_context(_metrics_server(settings, metrics, tenant_registry, states))
        stack.push_async_callback(health.stop, 0)
        await health.start(settings.host, settings.health_port, None, "health-port")
        stack.push_async_callback(server.stop, 0)
        port = await server.start(settings.host, settings.port, tls, "port")
        address = host_port(settings.host, port)
        log.info("endpoint picker ready at %s", address)
        gc.freeze()
        SupervisorStatus.from_fd(settings.status_fd).ready(f"grpc://{address}", model=texts[0].name)
        await stop.requested.wait()
        await states.drain()
        await _waited(stop, settings.drain_delay)
        ending = asyncio.create_task(server.stop(settings.request_timeout))
        await _either(ending, stop)
        await server.stop(HURRY_S)
        await ending


def _grpc_service() -> Any:
    """Return the module of the servers, which needs gRPC; raise ConfigError if the extra is not installed."""
    try:
        from kvferry.endpoint_picker import service
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        raise ConfigError(
            f"`kvferry epp` needs the package {error.name!r}: install kvferry with the extra 'epp', as in "
            "pip install 'kvferry[epp]'"
        ) from error
    return service


@contextlib.asynccontextmanager
async def _metrics_server(
    settings: EppSettings, metrics: RouterMetrics, tenant_registry: TenantRegistry, states: Any
) -> Any:
    """Serve /metrics, /health and /ready over HTTP until the end of the block.

    With tenants, the metrics show none of them."""
    app: FastAPI = make_app(lambda: (200, {"status": "ok"}), states.unready_reason)

    @app.get("/metrics")
    async def scrape() -> Response:
        text = await scraped(metrics, WorkerPeers(), "" if tenant_registry.keyring.guards else None)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    server = make_server(app, {})
    with contextlib.closing(bind(settings.host, settings.metrics_port)) as sock:
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            yield
        finally:
            server.should_exit = True
            await asyncio.wait((serving,))


async def _waited(stop: StopSignal, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.forced.wait()


async def _either(ending: asyncio.Task[None], stop: StopSignal) -> None:
    forced = asyncio.create_task(stop.forced.wait())
    await asyncio.wait((ending, forced), return_when=asyncio.FIRST_COMPLETED)
    forced.cancel()
