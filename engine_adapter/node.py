"""Lifecycle of an adapter: it waits for its engine, measures it, joins, serves and drains.

It lives as long as its engine's process does: a new engine is a new epoch, so that no router and no row of the block
index confuses the two. An elastic node takes a new epoch with each role."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import asdict

from kvferry.cluster_state.redis_store import RedisStore
from kvferry.cluster_state.seal import Seal
from kvferry.engine_adapter.endpoints import Endpoints
from kvferry.engine_adapter.engine import Engine
from kvferry.engine_adapter.identity import model_name
from kvferry.engine_adapter.node_loading import NodeLoading
from kvferry.engine_adapter.node_state import NodeState
from kvferry.engine_adapter.role_changes import ChangingNode, RoleChanges
from kvferry.protocol.messages import Pulse
from kvferry.protocol.node_settings import AdapterSettings
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.runtime.http import serve_metrics
from kvferry.runtime.signals import StopSignal
from kvferry.runtime.supervisor_status import SupervisorStatus
from kvferry.runtime.suspend_aware_clock import LoopClock
from kvferry.worker.journal_relay import JournalRelay
from kvferry.worker.lease_relay import LeaseRelay
from kvferry.worker.media_routes import MediaRoutes
from kvferry.worker.membership import WITHDRAW_S
from kvferry.worker.node_address import NodeAddress

log = logging.getLogger("kvferry.adapter")

PRIORITY = -5
"""Niceness that an adapter asks for: an engine that spins on all cores must not delay its heartbeats."""


class AdapterNode:
    """One node whose engine is another server. Belongs to one asyncio loop.

    Raises ConfigError when the settings cannot be used."""

    def __init__(self, settings: AdapterSettings, engine: Engine) -> None:
        self._settings, self._engine = settings, engine
        self.metrics = WorkerMetrics(settings.role)
        self.address = NodeAddress(settings, self._health, self._unready)
        self._status = SupervisorStatus.from_fd(settings.status_fd)
        self._store = RedisStore(
            settings.redis_url, settings.cluster, password_file=settings.redis_password_file,
            seal=Seal(self.address.secrets.registry_keys),
        )  # fmt: skip
        self._clock = LoopClock()
        self.draining = False
        self.state: NodeState | None = None
        self._loading = NodeLoading(
            settings, engine, self._store, self.address, self.metrics, self._clock, lambda: self.draining
        )
        self._changes = RoleChanges(
            engine, ChangingNode(lambda: self.state, self._drains, self._busy, self._rejoin), self.metrics,
            elastic=settings.elastic, within_s=settings.drain_timeout, graphs_gb=settings.decode_graphs_gb,
        )  # fmt: skip

    async def run(self, stop: StopSignal) -> bool:
        """Serve until asked to stop; return False if the engine ended first.

        Raises ConfigError if the engine cannot be used, or was not ready in time."""
        serve_metrics(self.address.app, self.metrics.registry, self._set_gauges)
        LeaseRelay(self._store.records).mount(self.address.app)
        JournalRelay(self._store.journals).mount(self.address.app)
        endpoints = Endpoints(self.address.node_id, lambda: self.state, lambda: self.draining)
        endpoints.mount(self.address.app)
        self.address.app.post("/role", status_code=202)(self._changes.post_role)
        self._media = MediaRoutes(
            self.address.app, self._engine.media,
            lambda: self.state.adapter_names if self.state and not self.draining else None,
        )  # fmt: skip
        self._clock.start()
        self.address.start()
        with contextlib.suppress(OSError):
            os.nice(PRIORITY)
        stopping = asyncio.create_task(stop.requested.wait())
        try:
            loading = asyncio.create_task(self._loading.first())
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                loading.cancel()
                return True
            self.state = loading.result()
            return await self._live(self.state, stopping, stop)
        finally:
            stopping.cancel()
            self._clock.stop()

    async def _live(self, state: NodeState, stopping: asyncio.Task[bool], stop: StopSignal) -> bool:
        gone = asyncio.create_task(state.watch.gone.wait())
        joining = asyncio.create_task(self._join(state))
        await asyncio.wait({stopping, gone}, return_when=asyncio.FIRST_COMPLETED)
        joining.cancel()
        if gone.done():
            log.critical("%s exits: the engine is gone: %s", self.address.node_id, state.watch.fault)
            await self._changes.stop()
            state = self.state or state
            await state.membership.leave(WITHDRAW_S)
            return False
        await self._changes.stop()
        await self._drain(self.state or state, gone, stop)
        return True

    async def _join(self, state: NodeState) -> None:
        await state.membership.join()
        facts = state.facts
        log.info("%s ready at %s for %s %s", self.address.node_id, self.address.url, facts.kind, facts.version)
        self._status.ready(
            self.address.url, model=model_name(facts), device=f"{facts.kind} {facts.version} at {self._settings.url}"
        )

    async def _drain(self, state: NodeState, gone: asyncio.Task[bool], stop: StopSignal) -> None:
        """Take no new work, let running attempts finish, deregister. After the limit they continue on other nodes."""
        may_wait = stop.drain_window(self._settings.drain_timeout)
        await state.membership.wait_for_replacement(lambda: may_wait() and state.streams.followed and not gone.done())
        self.draining = True
        log.info("%s drains", self.address.node_id)
        await state.membership.announce()
        while self._busy() and may_wait() and not gone.done():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        gone.cancel()
        state.watch.stop()
        await state.end()
        await self.address.stop()
        await state.membership.close()
        await self._engine.close()

    async def _rejoin(self, role: str) -> None:
        """Join with a new epoch in the role that the engine has now."""
        before = self.state
        assert before is not None
        await before.end()
        self.state = await self._loading.next(before, role)
        self.draining = False
        await self.state.membership.join()
        log.info("%s is a %s node with epoch %d", self.address.node_id, role, self.state.epoch)

    def _drains(self, draining: bool) -> None:
        self.draining = draining

    def _busy(self) -> bool:
        return self.state is not None and bool(self.state.attempts.running or self._media.running)

    def _pulse(self) -> Pulse:
        return Pulse(engine_s=self.state.watch.still_s) if self.state else Pulse()

    @property
    def _role(self) -> str:
        return self.state.settings.role if self.state else self._settings.role

    def _health(self) -> tuple[int, dict[str, object]]:
        if self.state is None:
            return 200, {"status": "loading", "role": self._role}
        if self.state.watch.fault:
            return 503, {"status": "broken", "fault": self.state.watch.fault}
        status = "draining" if self.draining else "ready" if self.state.membership.held else "joining"
        return 200, {"status": status, "role": self._role, "pulse": asdict(self._pulse())}

    def _unready(self) -> str:
        if self.state is None:
            return f"the engine at {self._settings.url} is not ready"
        if not self.state.membership.held:
            return f"it is not registered: {self.state.membership.trouble}"
        return "it is draining" if self.draining else self.state.watch.fault

    def _set_gauges(self) -> None:
        if self.state is not None:
            self.state.set_gauges(self.metrics, self._loading.adapter_metrics)
