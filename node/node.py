"""One running node: engine, lease, index and HTTP joined, with the role's service on top.

Threads: the engine thread, the link thread (owned by the service's link) and the asyncio loop, on which everything here
runs. A node is loading, ready, or draining.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import torch
from fastapi import FastAPI

from cluster_state.index import IndexWriter
from cluster_state.redis_store import RedisStore
from cluster_state.registry import LeaseKeeper
from engine.events import Admitted, BlocksChanged, Event, Stepped
from engine.loop import EngineLoop
from kv_transfer.ucx import UcxLink
from node.assembly import Assembled, assemble, describe
from node.rates import RateMeter, warm_up
from process.http import bind, make_app, make_server, serve_metrics
from process.signals import Stop
from process.status import Status
from protocol.errors import ConfigError, Draining
from protocol.messages import Load, NodeLease, Rates
from protocol.metrics import WorkerMetrics
from protocol.settings import WorkerSettings

log = logging.getLogger("kvferry.node")

LEAVE_S = 1.0
"""What each last word to Redis may take: a Redis that hangs must not keep a node from ending."""
UNSPECIFIED = ("0.0.0.0", "::", "")
"""Hosts to listen on that name no machine."""


class Service(Protocol):
    """The role's half of a node. `on_events` is called on the asyncio loop, with all news of a turn of the engine; what
    only the node counts is among it."""

    link_address: str

    def on_events(self, events: Sequence[Event]) -> None: ...

    def busy(self) -> bool:
        """Whether attempts are under way (a draining node waits for them)."""

    def stop(self) -> None:
        """Close the link and every open response."""


class Node:
    """Settings to a serving process. `run` returns after SIGTERM or SIGINT and an orderly drain."""

    def __init__(self, settings: WorkerSettings, make_service: Callable[[Node], Service]) -> None:
        if not settings.advertise_host and settings.host in UNSPECIFIED:
            raise ConfigError(
                f"--host {settings.host} is no address that other processes can dial; add --advertise-host",
                param="advertise_host",
            )
        self.settings = settings
        self.metrics = WorkerMetrics(settings.role)
        self.epoch = time.time_ns() // 1000
        self.app: FastAPI = make_app(self._health, lambda: self._state == "ready")
        self.loop = asyncio.get_running_loop()
        self.parts: Assembled
        self.engine: EngineLoop
        self._make_service = make_service
        self._service: Service | None = None
        self._state = "loading"
        self._progress = 0.0
        self._status = Status.from_fd(settings.status_fd)
        self._socket: socket.socket = bind(settings.host, settings.port)
        self.port = int(self._socket.getsockname()[1])
        self._store = RedisStore(settings.redis_url, settings.cluster)
        self._rates: RateMeter
        self._writer: IndexWriter
        self._keeper: LeaseKeeper

    @property
    def host(self) -> str:
        return self.settings.advertise_host or self.settings.host

    @property
    def http_url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def was_ready(self) -> bool:
        return self._state != "loading"

    @property
    def node_id(self) -> str:
        return self.settings.node_id or f"{self.settings.role}-{socket.gethostname()}-{self.port}"

    async def run(self, stop: Stop) -> None:
        """Load, serve until asked to stop, drain. Asked while still loading it returns at once, with `was_ready` False.
        Raises ConfigError when the node cannot start."""
        serve_metrics(self.app, self.metrics.registry, self._refresh)
        server = make_server(self.app)
        serving = asyncio.create_task(server.serve(sockets=[self._socket]))
        loading, asked = asyncio.create_task(self._load()), asyncio.create_task(stop.asked.wait())
        try:
            await asyncio.wait({loading, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                return
            loading.result()
            log.info("%s ready at %s, link %s", self.node_id, self.http_url, self.lease().link_address)
            self._status.ready(self.http_url, **describe(self.parts), link=self.lease().link_address)
            await asked
            await self._drain(stop)
        finally:
            asked.cancel()
            server.should_exit = True
            await serving
            log.info("%s has ended", self.node_id)

    def make_link(self) -> UcxLink:
        """The link of this node, not yet started."""
        settings, device = self.settings, self.parts.kv.device
        return UcxLink(
            self.host,
            settings.link_port,
            transports=settings.ucx_transports,
            net_devices=settings.ucx_net_devices,
            cuda=device.type == "cuda",
            prepare=self._enter_thread,
        )

    @property
    def verify_checksums(self) -> float:
        """Share of blocks to checksum: CRC32 is taken on the CPU, so blocks in a GPU's memory are not checksummed."""
        return self.settings.verify_checksums if self.parts.kv.device.type == "cpu" else 0.0

    def _enter_thread(self) -> None:
        """First call on a thread that touches the device."""
        if self.parts.kv.device.type == "cuda":
            torch.cuda.set_device(self.parts.kv.device)

    def require_ready(self) -> None:
        """Raise Draining unless new work may begin."""
        if self._state != "ready":
            raise Draining(f"{self.node_id} is {self._state}")

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run on the asyncio loop, from any thread; ignored once the loop is closed."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(call)

    def shipped(self, num_bytes: int, seconds: float) -> None:
        """A ship to or from this node ended: count it and learn from it."""
        self.metrics.ship_bytes.inc(num_bytes)
        self.metrics.ship_seconds.inc(seconds)
        self._rates.shipped(num_bytes, seconds)

    def lease(self) -> NodeLease:
        """The node's row in the registry, as of now."""
        assert self._service is not None
        return NodeLease(
            node_id=self.node_id,
            role=self.settings.role,
            epoch=self.epoch,
            state=self._state,
            http_url=self.http_url,
            link_address=self._service.link_address,
            fingerprint=self.parts.fingerprint,
            model=self.parts.info.name,
            max_model_len=self.parts.max_model_len,
            block_size=self.parts.layout.block_size,
            block_bytes=self.parts.layout.block_bytes,
            load=self.engine.load,
            rates=self._rates.rates,
        )

    async def _load(self) -> None:
        self.parts, seed = await asyncio.to_thread(self._build)
        self._rates = RateMeter(seed)
        self.engine = EngineLoop(self.parts.engine, self._on_events, self._enter_thread)
        self._service = self._make_service(self)
        self._writer = IndexWriter(self._store, self.node_id, self.epoch, self.parts.engine.pool.findable)
        self._keeper = LeaseKeeper(
            self._store, self.lease, on_restored=self._writer.republish, on_outcome=self._lease_outcome
        )
        self.engine.start()
        self._state = "ready"
        await self._writer.start()
        await self._keeper.start()

    def _build(self) -> tuple[Assembled, Rates]:
        parts = assemble(self.settings, self._on_progress)
        return parts, warm_up(parts.engine)

    async def _drain(self, stop: Stop) -> None:
        """Take nothing new, let what runs finish unless there is a hurry, leave the registry, stop."""
        self._state = "draining"
        assert self._service is not None
        log.info("%s drains%s", self.node_id, ", in a hurry" if stop.hurry.is_set() else "")
        if not stop.hurry.is_set():
            await _within(LEAVE_S, self._keeper.announce_now())
        deadline = time.monotonic() + self.settings.drain_timeout
        while self._busy() and not stop.hurry.is_set() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await _within(LEAVE_S, self._keeper.stop(), self._writer.stop())
        await asyncio.to_thread(self.engine.stop)
        await asyncio.sleep(0)
        self._service.stop()
        await _within(LEAVE_S, self._store.close())

    def _busy(self) -> bool:
        assert self._service is not None
        return self.engine.busy or self._service.busy()

    def _on_progress(self, share: float) -> None:
        self._progress = share
        self._status.loading(share)

    def _on_events(self, events: Sequence[Event]) -> None:
        self.call_soon(lambda: self._dispatch(events))

    def _dispatch(self, events: Sequence[Event]) -> None:
        """The service comes first: tokens are waited for."""
        assert self._service is not None
        self._service.on_events(events)
        for event in events:
            if isinstance(event, Stepped):
                self._stepped(event)
            elif isinstance(event, BlocksChanged):
                self._writer.note(event.stored, event.removed)
            elif isinstance(event, Admitted):
                self._admitted(event)

    def _stepped(self, event: Stepped) -> None:
        m = self.metrics
        self._rates.stepped(event)
        m.step.observe(event.seconds)
        for counter, count in (
            (m.step_tokens["prefill"], event.prefill_tokens),
            (m.step_tokens["decode"], event.decode_tokens),
            (m.preemptions, event.preempted),
            (m.evictions, event.evicted),
        ):
            if count:
                counter.inc(count)

    def _admitted(self, event: Admitted) -> None:
        m = self.metrics
        m.queue.observe(event.queue_s)
        m.prefix_queries.inc(event.queried)
        m.prefix_hits.inc(event.hit)

    def _lease_outcome(self, outcome: str) -> None:
        self.metrics.lease_renewals[outcome].inc()

    def _health(self) -> tuple[int, dict[str, object]]:
        fault = self.engine.fault if self._state != "loading" else None
        body: dict[str, object] = {"status": self._state, "progress": self._progress}
        return (200, body) if fault is None else (503, {**body, "fault": fault})

    def _refresh(self) -> None:
        """Set the gauges that mirror the engine's books."""
        if self._state == "loading":
            return
        m, load = self.metrics, self.engine.load
        m.requests_waiting.set(load.waiting_requests)
        m.waiting_tokens.set(load.waiting_tokens)
        m.requests_running.set(load.running_requests)
        m.kv_blocks_total.set(load.total_blocks)
        for state, count in block_books(load).items():
            m.kv_blocks[state].set(count)
        m.grants_open.set(load.open_grants)
        m.index_rows.set(self._writer.rows)
        m.index_pending.set(self._writer.pending)


async def _within(seconds: float, *calls: Coroutine[Any, Any, Any]) -> None:
    """Run the calls at once and give up those that take longer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*calls)


def block_books(load: Load) -> dict[str, int]:
    """Blocks by state; they add up to the pool's size."""
    return {
        "free": load.free_blocks,
        "active": load.active_blocks,
        "cached": load.cached_blocks,
        "granted": load.granted_blocks,
    }
