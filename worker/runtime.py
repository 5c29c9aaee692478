"""Running node with a loaded model: joins engine, link, role service, membership and watchdog, from start to drain.

Threads: the engine thread, the link thread (started by the service) and the asyncio loop. Everything here runs on the
loop unless stated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fastapi import Request

from kvferry.cluster_state.redis_store import RedisStore
from kvferry.engine.loop import EngineLoop
from kvferry.model_files.model_name import split_names
from kvferry.protocol.errors import Draining
from kvferry.protocol.lease import NodeLease, Rates
from kvferry.protocol.messages import CancelRequest
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.runtime.http import read_message
from kvferry.runtime.signals import StopSignal
from kvferry.runtime.suspend_aware_clock import LoopClock
from kvferry.worker.adapters import NodeAdapters
from kvferry.worker.draining import finish_requests
from kvferry.worker.engine_parts import EngineParts
from kvferry.worker.event_relay import EventRelay, set_load_gauges
from kvferry.worker.link_factory import LinkParts
from kvferry.worker.membership import WITHDRAW_S, Membership
from kvferry.worker.node_address import NodeAddress
from kvferry.worker.rates import RateMeter
from kvferry.worker.roles import RoleChange, Roles
from kvferry.worker.scaling_signals import pressure_now, set_scaling_gauges
from kvferry.worker.service import MakeService, NodeParts
from kvferry.worker.streams import RouterStreams
from kvferry.worker.tier_factory import OpenTiers
from kvferry.worker.transfer_stats import TransferStats
from kvferry.worker.watchdog import ThreadLiveness, Watchdog

log = logging.getLogger("kvferry.worker")


class WorkerRuntime:
    """Node that serves from `join` until `drain` has returned.

    seed: rates measured by the warm-up. force_exit: ends the process because of a fault, from any thread, if the
    asyncio loop cannot; None: the process has other uses than the node."""

    def __init__(
        self,
        settings: WorkerSettings,
        address: NodeAddress,
        metrics: WorkerMetrics,
        store: RedisStore,
        parts: EngineParts,
        seed: Rates,
        tiers: OpenTiers,
        epoch: int,
        make_service: MakeService,
        force_exit: Callable[[str], None] | None,
    ) -> None:
        self.draining, self.broken = False, asyncio.Event()
        self.roles = Roles(settings.role, settings.role)
        (self._served_names,) = split_names(settings.served_model_name, 1)
        self._epoch = parts.engine.pool.miss_reasons.epoch = epoch
        self._settings, self._address, self._metrics, self.parts = settings, address, metrics, parts
        self._loop = asyncio.get_running_loop()
        self._rates, self._transfer_stats = RateMeter(seed), TransferStats()
        self._clock, linking = LoopClock(), LinkParts(settings, address, parts.kv, parts.apart)
        self.engine = EngineLoop(
            parts.engine, lambda events: news.take(events), linking.enter_thread, lambda fault: self._break()
        )
        self._tiers, self.link = tiers, linking.link(self._break)
        self._streams = RouterStreams(
            epoch, lambda: self.liveness.pulse, lambda router: self.service.router_lost(router), self._clock
        )
        self._streams.mount(address.app)
        self._dock = linking.dock(self.link, epoch)
        self.service = make_service(
            NodeParts(
                settings=settings,
                epoch=self._epoch,
                app=address.app,
                metrics=metrics,
                parts=parts,
                engine=self.engine,
                dock=self._dock,
                rates=self._rates,
                transfer_stats=self._transfer_stats,
                streams=self._streams,
                tiers=tiers,
                require_ready=self.require_ready,
                roles=self.roles,
                call_soon=self.call_soon,
                keyed=address.keyed,
                adapters=lambda: self._adapters.held,
            )
        )
        self._dock.start()
        address.app.post("/attempts/cancel", status_code=202)(self.post_cancel)
        self._adapters = NodeAdapters(
            settings, parts.engine.runner.model, self.engine, parts.adapters, lambda: self._membership.announce()
        )
        address.app.post("/adapters", status_code=202)(self._adapters.post_change)
        watched = parts.engine.config.limits.max_num_batched_tokens, self._rates, parts.ranks, parts.embeddings
        self.liveness = ThreadLiveness(self.engine, self.link, self._clock, *watched)
        self._watchdog = Watchdog(
            self.liveness, self._break, force_exit or (lambda fault: None), of_process=force_exit is not None
        )
        self._membership = Membership(
            store, self.lease, parts.engine.pool.changes.rows, metrics, tiers.local, tiers.shared
        )
        self.role_change = RoleChange(
            self.roles, self.engine, self._membership, metrics,
            elastic=settings.elastic, call_soon=self.call_soon, drains=self._drains, busy=self._busy,
            within_s=settings.drain_timeout,
        )  # fmt: skip
        address.app.post("/role", status_code=202)(self.role_change.post_role)
        news = EventRelay(self.service, metrics, self._rates, self._membership.note, self.call_soon)
        self.engine.start()
        self._clock.start()
        self._watchdog.start()

    @property
    def state(self) -> str:
        """Return the state for the lease: ready or draining."""
        return "draining" if self.draining else "ready"

    @property
    def fault(self) -> str | None:
        """Return why the process must end; None if it need not. `broken` is set then.

        Faults: a thread ended or hangs, block accounting failed, or the device failed."""
        return self.liveness.fault

    def require_ready(self) -> None:
        """Raise Draining unless new work may begin. From any thread."""
        if self.draining:
            raise Draining(f"{self._address.node_id} is draining")

    async def post_cancel(self, request: Request) -> None:
        """Drop all attempts of a request up to the given one."""
        cancel = await read_message(request, CancelRequest)
        self.engine.cancel(cancel.request_id, cancel.attempt)
        self.service.cancel(cancel)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run a call on the asyncio loop, from any thread; ignored once the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def lease(self) -> NodeLease:
        """Return the node's current lease."""
        return NodeLease(
            node_id=self._address.node_id,
            role=self.roles.now,
            epoch=self._epoch,
            state=self.state,
            http_url=self._address.url,
            link_address=self.link.address,
            fingerprint=self.parts.fingerprint,
            model=self.parts.info.name,
            max_model_len=self.parts.max_model_len,
            block_size=self.parts.layout.block_size,
            block_bytes=self.parts.layout.block_bytes,
            load=self.engine.load,
            rates=self._tiers.paced(self._rates.rates),
            served_names=self._served_names,
            adapters=self._adapters.held,
            modalities=self.parts.abilities,
            max_num_seqs=self._settings.max_num_seqs,
            pulse=self.liveness.pulse,
            sent=self._transfer_stats.rows(),
            elastic=self._settings.elastic,
            role_s=self.roles.role_s,
            pressure=pressure_now(self.roles.now, self._settings, self.engine.load, self._rates, self.engine.waits_s),
            state_blocks=states.num_blocks if (states := self.parts.engine.states) is not None else 0,
            state_stride=states.stride if states is not None else 0,
            media_row_bytes=self.parts.media_row_bytes,
            window_pages=self.parts.layout.window_pages,
        )

    @property
    def absence(self) -> str:
        """Return why new routers cannot find the node; empty if they can."""
        return "" if self._membership.held else self._membership.trouble or "its lease has lapsed"

    async def join(self) -> None:
        """Enter the cluster; returns once the node is registered."""
        await self._membership.join()

    async def drain(self, stop: StopSignal) -> None:
        """Drain and stop the node, within `drain_timeout`; after a second signal, wait for nothing.

        The last node of its role first continues to serve until another is ready, while routers are connected. Then it
        accepts no new work, lets running work finish or move, leaves the cluster and stops."""
        may_wait = stop.drain_window(self._settings.drain_timeout)
        await self.role_change.stop()
        if not self._settings.respawned and self.roles.now != "encode":  # prefill nodes can do an encode node's work
            await self._membership.wait_for_replacement(lambda: may_wait() and self._streams.followed)
        self.draining = True
        log.info("%s drains%s", self._address.node_id, " without waiting for requests" if stop.forced.is_set() else "")
        if not stop.forced.is_set():
            await self._membership.announce()
        await finish_requests(self.engine, self._busy, may_wait)
        await self._membership.leave()
        self.unwatch()
        await asyncio.to_thread(self.engine.stop)
        await asyncio.sleep(0)
        self._streams.stop()
        self.service.stop()
        await asyncio.to_thread(self._dock.stop)  # it blocks, and the streams' last frames must be sent meanwhile
        self._tiers.close()
        if self.parts.ranks is not None:
            self.parts.ranks.close()
        await self._membership.close()

    def unwatch(self) -> None:
        """Stop the watchdog, because threads are about to end."""
        self._watchdog.stop()
        self._clock.stop()

    async def abandon(self) -> None:
        """Withdraw the lease, if Redis answers at once, after a thread has ended or hangs.

        No orderly shutdown is possible. The process ends next, which peers and routers notice."""
        log.critical("%s exits at once: %s", self._address.node_id, self.fault)
        await self._membership.leave(WITHDRAW_S)

    def set_gauges(self) -> None:
        """Set the gauges of load, scaling, index and tiers."""
        set_load_gauges(self._metrics, self.engine.load, self.engine.leaked_s())
        set_scaling_gauges(
            self._metrics.scaling, self.roles.now, self._settings, self.engine.load, self._rates, self.engine.waits_s
        )
        self._membership.set_gauges()
        for tier in self._tiers.local:
            self._metrics.tiers.bytes[tier.name].set(tier.used)

    def _drains(self, drains: bool) -> None:
        self.draining = drains

    def _busy(self) -> bool:
        return self.engine.busy or self.service.busy()

    def _break(self) -> None:
        """Signal a fault, from any thread."""
        self.call_soon(self.broken.set)
