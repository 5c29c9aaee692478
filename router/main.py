"""Main coroutine of `kvferry router`: builds the router from its settings, serves until a signal, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import sys
from functools import partial
from typing import Any

import uvicorn

from kvferry.cluster_state.journals import Journals
from kvferry.cluster_state.memory_router_leases import MemoryRouterLeases
from kvferry.cluster_state.redis_journals import RedisJournals
from kvferry.cluster_state.redis_responses import RedisResponses
from kvferry.cluster_state.redis_router_leases import RedisRouterLeases
from kvferry.cluster_state.redis_store import RedisStore
from kvferry.cluster_state.responses import ResponseStore
from kvferry.cluster_state.router_ownership import RouterOwnership
from kvferry.cluster_state.seal import Seal
from kvferry.protocol.errors import RegistryUnavailable
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.settings import RouterSettings
from kvferry.router import draining
from kvferry.router.api.app import create_app
from kvferry.router.api.served_models import ServedModels, pool_of
from kvferry.router.batch.batches import Batches
from kvferry.router.batch.redis_store import cluster_files
from kvferry.router.dashboard.snapshot import SnapshotBuilder
from kvferry.router.dispatch.canary_release import CanaryRelease
from kvferry.router.dispatch.cluster import RouterCluster, Store
from kvferry.router.journal.request_journals import RequestJournals
from kvferry.router.nodes.node_source import LastNodes
from kvferry.router.role_rebalancing import RoleRebalancer
from kvferry.router.tenants.tenant_registry import TenantRegistry
from kvferry.router.text.loader import load_text_models
from kvferry.router.worker_peers.exposition import scraped
from kvferry.router.worker_peers.peers import WorkerPeers
from kvferry.runtime.address import host_port
from kvferry.runtime.cluster_secret import ClusterSecrets
from kvferry.runtime.connection_limits import Limits
from kvferry.runtime.graceful_close import lingering
from kvferry.runtime.http import Server, bind
from kvferry.runtime.large_buffers import map_large_buffers
from kvferry.runtime.limits import allow_descriptors
from kvferry.runtime.loop_lag import watched
from kvferry.runtime.rejection_throttle import RejectionThrottle
from kvferry.runtime.signals import StopSignal
from kvferry.runtime.supervisor_status import SupervisorStatus
from kvferry.runtime.tls import load, server_tls, worker_tls

log = logging.getLogger(__name__)

GC_THRESHOLD = 250_000
"""Garbage collection threshold, in objects allocated.

Requests create no reference cycles. A thousand running requests hold more objects than the default threshold, so the
collector would scan them constantly. Objects that exist before the first request are never scanned (`gc.freeze`)."""
SWITCH_S = 0.001
"""Interpreter switch interval: how long a rendering or tokenising thread may delay the event loop, in seconds."""
HURRY_S = 2.0
"""Time that running requests get after SIGINT or a second signal, in seconds."""
IDLE_S = 30.0
"""Idle time of a client connection, in seconds.

It exceeds the idle time of common clients, so that no client reuses a connection while it closes."""
OWN_DESCRIPTORS = 256
"""Number of open files besides clients' connections: for nodes, Redis, other processes and batch files."""


async def serve_router(settings: RouterSettings) -> None:
    """Run a router until SIGTERM or SIGINT.

    After SIGTERM it accepts no new requests (see `draining`), and running requests may finish within `request_timeout`.
    SIGINT or a second signal gives them HURRY_S. Raises ConfigError if the port, the model or Redis cannot be used. If
    Redis does not answer yet, the router serves and waits for it."""
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(GC_THRESHOLD)
    map_large_buffers()
    stop = StopSignal()
    stop.listen()
    secrets = ClusterSecrets(settings)
    seal = Seal(secrets.registry_keys)
    responses = response_store(settings, seal)
    redis, password_file = (settings.redis_url, settings.cluster), settings.redis_password_file
    leases = RedisRouterLeases(*redis, password_file=password_file)
    store = RedisStore(*redis, password_file=password_file, seal=seal)
    share = settings.resume_store_mib * 2**20
    journal_store = RedisJournals(*redis, share=share, password_file=password_file, seal=seal)
    try:
        with contextlib.suppress(RegistryUnavailable):
            await store.check()
        with contextlib.closing(bind(settings.host, settings.port, shared=settings.worker >= 0)) as sock:
            await run_router(settings, secrets, store, sock, stop, responses, RouterOwnership(leases), journal_store)
    finally:
        await store.close()
        await leases.close()
        await journal_store.close()
        if responses is not None:
            await responses.close()


def response_store(settings: RouterSettings, seal: Seal) -> RedisResponses | None:
    """Return the store of responses; None if responses are not stored."""
    if not settings.response_ttl:
        return None
    ttl_s, share = settings.response_ttl, settings.response_store_mib * 2**20
    url, password_file = settings.redis_url, settings.redis_password_file
    return RedisResponses(url, settings.cluster, ttl_s=ttl_s, share=share, password_file=password_file, seal=seal)


async def run_router(
    settings: RouterSettings,
    secrets: ClusterSecrets,
    store: Store,
    sock: socket.socket,
    stop: StopSignal,
    responses: ResponseStore | None = None,
    ownership: RouterOwnership | None = None,
    journal_store: Journals | None = None,
) -> None:
    """Serve on a bound socket until `stop`."""
    metrics, seal = RouterMetrics(), Seal(secrets.registry_keys)
    batches = Batches(settings, cluster_files(settings, seal), ownership, metrics.batches)
    ownership = ownership or RouterOwnership(MemoryRouterLeases(), is_shared=False)
    status = SupervisorStatus.from_fd(settings.status_fd)
    tenants = TenantRegistry(settings)
    texts = await asyncio.to_thread(load_text_models, settings)
    nodes = RouterCluster(
        store,
        store,
        metrics,
        local_tokens=settings.local_prefill_tokens,
        buddies=settings.buddies,
        fetch=settings.fetch,
        max_wait_s=settings.queue_timeout,
        canary=CanaryRelease.of(settings),
        token=secrets.token,
        tls=worker_tls(settings.worker_ca_certs, settings.worker_server_name),
        last=LastNodes(settings.data_folder, seal, writes=settings.worker <= 0),
        relayed=store.records,
    )
    if isinstance(journal_store, RedisJournals):
        journal_store.fall_back_on(nodes.journal_relay)
    journals = RequestJournals(settings, ownership.owner, metrics.journals, journal_store)
    limits = connection_limits(settings, allow_descriptors())
    snapshots, peers, throttle = SnapshotBuilder(nodes, metrics), WorkerPeers.of(settings), RejectionThrottle()
    pools = ServedModels(*(pool_of(text, nodes.pool(text.called), metrics, settings, tenants) for text in texts))
    background: tuple[contextlib.AbstractAsyncContextManager[Any], ...] = (
        secrets.followed(), tenants.keyring.followed(), snapshots.running(), watched(metrics.loop),
        peers.answering()
    )  # fmt: skip
    if settings.elastic:
        background += (RoleRebalancer(pools, nodes.change_role, settings.elastic_rest).running(),)
    async with nodes, contextlib.aclosing(pools), contextlib.AsyncExitStack() as stack:
        app = create_app(
            settings, pools, metrics, tenants, responses, batches, snapshots, peers, throttle, ownership, journals
        )
        for each in (*background, journals.running(), ownership.running()):
            await stack.enter_async_context(each)
        config = uvicorn.Config(
            app,
            **server_tls(settings),
            http=lingering(limits, throttle),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(IDLE_S),
            timeout_graceful_shutdown=int(settings.request_timeout) + 1,
        )
        load(config)
        server = Server(config, handshake_s=settings.header_timeout)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        url = f"{'https' if config.is_ssl else 'http'}://{host_port(settings.host, sock.getsockname()[1])}"
        log.info("router ready at %s", url)
        gc.freeze()
        status.ready(url, model=texts[0].name)
        async with batches:
            closing = draining.answering(
                sock,
                server,
                partial(scraped, metrics, peers, "" if tenants.keyring.guards else None),
                server_tls(settings),
                limits,
            )
            await _serve_until_stopped(server, serving, stop, closing, ownership)


def connection_limits(settings: RouterSettings, descriptors: int) -> Limits:
    """Return the limits of client connections; descriptors: files that the process may have open."""
    needed = settings.max_inflight + OWN_DESCRIPTORS
    if descriptors < needed:
        log.warning(
            "%d open files are too few for --max-inflight %d: raise the hard limit (ulimit -Hn) to %d or more",
            descriptors, settings.max_inflight, needed,
        )  # fmt: skip
    return Limits(
        header_s=settings.header_timeout,
        body_s=settings.body_timeout,
        min_rate=settings.min_body_rate,
        reader_s=settings.reader_timeout,
        request_s=settings.request_timeout,
        body_bytes=max(settings.max_body_mib, settings.files_mib) * 2**20,
        per_address=settings.max_connections_per_address,
        connections=max(descriptors - OWN_DESCRIPTORS, descriptors // 2),
    )


async def _serve_until_stopped(
    server: uvicorn.Server,
    serving: asyncio.Task[None],
    stop: StopSignal,
    closing: contextlib.AbstractAsyncContextManager[None],
    ownership: RouterOwnership,
) -> None:
    """Return when the server has ended, with `last` open from the stop signal on.

    It ends by itself after its last request, or HURRY_S after a second signal."""
    stopping = asyncio.create_task(stop.requested.wait())
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if serving.done():
        await serving
        return
    ownership.drain()
    async with closing:
        await _drain(server, serving, stop)


async def _drain(server: uvicorn.Server, serving: asyncio.Task[None], stop: StopSignal) -> None:
    server.should_exit = True
    forced_task = asyncio.create_task(stop.forced.wait())
    await asyncio.wait((serving, forced_task), return_when=asyncio.FIRST_COMPLETED)
    forced_task.cancel()
    if not serving.done():
        await asyncio.wait((serving,), timeout=HURRY_S)
        for task in server.server_state.tasks:
            task.cancel()
        server.force_exit = True
    await serving
