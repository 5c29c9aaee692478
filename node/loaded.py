"""A node whose model is loaded: engine, link, role and place in the cluster, joined.

Threads: the engine thread, the link thread (started by the service) and the asyncio loop, on which everything here runs
but what says otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import torch

from cluster_state.redis_store import RedisStore
from engine.loop import EngineLoop
from kv_transfer.ucx import UcxLink
from model_files.naming import split_names
from node.adapters import NodeAdapters
from node.assembly import Assembled
from node.face import Face
from node.membership import Membership
from node.news import News, set_load_gauges
from node.rates import RateMeter
from node.service import Base, MakeService
from node.vitals import Vitals
from process.signals import Stop
from protocol.errors import Draining
from protocol.lease import NodeLease, Rates
from protocol.metrics import WorkerMetrics
from protocol.settings import WorkerSettings

log = logging.getLogger("kvferry.node")

ABANDON_S = 0.5
"""What withdrawing the lease may take when a thread has ended: the supervisor is to restart the process at once."""


class Loaded:
    """Serves from `join` until `drain` has returned. `seed`: rates that the warm-up measured."""

    def __init__(
        self,
        settings: WorkerSettings,
        face: Face,
        metrics: WorkerMetrics,
        store: RedisStore,
        parts: Assembled,
        seed: Rates,
        make_service: MakeService,
    ) -> None:
        self.draining = False
        (self._served_names,) = split_names(settings.served_model_name, 1)
        self.broken = asyncio.Event()
        self._epoch = time.time_ns() // 1000
        self._settings, self._face, self._metrics, self.parts = settings, face, metrics, parts
        self._loop = asyncio.get_running_loop()
        self._rates = RateMeter(seed)
        self.engine = EngineLoop(parts.engine, lambda events: news.take(events), self._enter_thread, self._thread_ended)
        self.link = self._make_link()
        self.service = make_service(
            Base(
                settings=settings,
                epoch=self._epoch,
                app=face.app,
                metrics=metrics,
                parts=parts,
                engine=self.engine,
                link=self.link,
                rates=self._rates,
                require_ready=self.require_ready,
                call_soon=self.call_soon,
            )
        )
        self._adapters = NodeAdapters(
            settings, parts.engine.runner.model, self.engine, parts.adapters, lambda: self._membership.announce()
        )
        face.app.post("/adapters", status_code=202)(self._adapters.post_change)
        self._membership = Membership(store, self.lease, parts.engine.pool.findable, metrics)
        self._vitals = Vitals(self.engine, self.link, parts.engine.config.limits.max_num_batched_tokens, self._rates)
        news = News(self.service, metrics, self._rates, self._membership.note, self.call_soon)
        self.engine.start()

    @property
    def state(self) -> str:
        """As the lease says it."""
        return "draining" if self.draining else "ready"

    @property
    def fault(self) -> str | None:
        """Why the process should be restarted, if it should: a thread ended (`broken` is set then) or hangs, or the
        books do not balance."""
        return self._vitals.fault

    def require_ready(self) -> None:
        """Raise Draining unless new work may begin. From any thread."""
        if self.draining:
            raise Draining(f"{self._face.node_id} is draining")

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run on the asyncio loop, from any thread; ignored once the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def lease(self) -> NodeLease:
        """The node's row in the registry, as of now."""
        parts = self.parts
        return NodeLease(
            node_id=self._face.node_id,
            role=self._settings.role,
            epoch=self._epoch,
            state=self.state,
            http_url=self._face.url,
            link_address=self.link.address,
            fingerprint=parts.fingerprint,
            model=parts.info.name,
            max_model_len=parts.max_model_len,
            block_size=parts.layout.block_size,
            block_bytes=parts.layout.block_bytes,
            load=self.engine.load,
            rates=self._rates.rates,
            served_names=self._served_names,
            adapters=self._adapters.held,
            max_num_seqs=self._settings.max_num_seqs,
        )

    @property
    def registered(self) -> bool:
        """Whether routers can find the node: a lease was written, and renewed within its life since. Work from routers
        that know the node already is taken without it."""
        return self._membership.held

    async def join(self) -> None:
        """Enter the cluster; returns once the node is registered."""
        await self._membership.join()

    async def drain(self, stop: Stop) -> None:
        """Take nothing new, let what runs finish unless there is a hurry, leave the cluster, stop."""
        self.draining = True
        log.info("%s drains%s", self._face.node_id, ", in a hurry" if stop.hurry.is_set() else "")
        if not stop.hurry.is_set():
            await self._membership.announce()
        deadline = time.monotonic() + self._settings.drain_timeout
        while self._busy() and not stop.hurry.is_set() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await self._membership.leave()
        await asyncio.to_thread(self.engine.stop)
        await asyncio.sleep(0)
        self.service.stop()
        await self._membership.close()

    async def abandon(self) -> None:
        """A thread has ended: nothing here can be brought to an end. Take the node out of the cluster, if Redis answers
        at once; its process ends next, which its peers and routers notice."""
        log.critical("%s ends: %s", self._face.node_id, self.fault)
        await self._membership.leave(ABANDON_S)

    def set_gauges(self) -> None:
        set_load_gauges(self._metrics, self.engine.load)
        self._membership.set_gauges()

    def _busy(self) -> bool:
        return self.engine.busy or self.service.busy()

    def _make_link(self) -> UcxLink:
        settings = self._settings
        return UcxLink(
            self._face.host,
            settings.link_port,
            listen=settings.host,
            transports=settings.ucx_transports,
            net_devices=settings.ucx_net_devices,
            cuda=self.parts.kv.device.type == "cuda",
            prepare=self._enter_thread,
            on_fault=self._thread_ended,
        )

    def _thread_ended(self, fault: str) -> None:
        """On the thread that ends."""
        self.call_soon(self.broken.set)

    def _enter_thread(self) -> None:
        """First call on a thread that touches the device."""
        if self.parts.kv.device.type == "cuda":
            torch.cuda.set_device(self.parts.kv.device)
