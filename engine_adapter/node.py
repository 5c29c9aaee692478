"""Lifecycle of an adapter: it waits for its engine, measures it, joins, serves and drains.

It lives as long as its engine's process does: a new engine is a new epoch, so that no router and no row of the block
index takes one for the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import asdict

from kvferry.cluster_state.redis_store import RedisStore
from kvferry.cluster_state.seal import Seal
from kvferry.engine_adapter.endpoints import Endpoints
from kvferry.engine_adapter.engine import Engine, EngineFacts
from kvferry.engine_adapter.engine_watch import EngineWatch
from kvferry.engine_adapter.identity import model_name, require_role
from kvferry.engine_adapter.measured_engine import measured_engine
from kvferry.engine_adapter.measured_guarantees import Measurement
from kvferry.engine_adapter.media_routes import MediaRoutes
from kvferry.engine_adapter.node_parts import NodeParts
from kvferry.engine_adapter.node_state import NodeState
from kvferry.engine_adapter.pooling_work import pooling_of
from kvferry.protocol.adapter_metrics import AdapterMetrics
from kvferry.protocol.errors import ConfigError, KvferryError, RegistryUnavailable
from kvferry.protocol.messages import Pulse
from kvferry.protocol.node_settings import AdapterSettings
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.runtime.http import serve_metrics
from kvferry.runtime.signals import StopSignal
from kvferry.runtime.supervisor_status import SupervisorStatus
from kvferry.runtime.suspend_aware_clock import LoopClock
from kvferry.worker.address import NodeAddress
from kvferry.worker.membership import LAST_WORD_S, Membership, new_epoch
from kvferry.worker.streams import RouterStreams

log = logging.getLogger("kvferry.adapter")

LOOK_S = 0.5
"""Seconds between two looks for an engine that is not ready yet."""
PRIORITY = -5
"""Niceness that an adapter asks for: an engine that spins on all cores must not cost it its signs of life."""


class AdapterNode:
    """One node whose engine is another server. Belongs to one asyncio loop.

    Raises ConfigError when the settings cannot be used."""

    def __init__(self, settings: AdapterSettings, engine: Engine) -> None:
        self._settings, self._engine = settings, engine
        self.metrics = WorkerMetrics(settings.role)
        self.mirror_metrics = AdapterMetrics(self.metrics.registry)
        self.address = NodeAddress(settings, self._health, self._unready)
        self._status = SupervisorStatus.from_fd(settings.status_fd)
        self._store = RedisStore(
            settings.redis_url, settings.cluster, password_file=settings.redis_password_file,
            seal=Seal(self.address.secrets.registry_keys),
        )  # fmt: skip
        self._clock = LoopClock()
        self.draining = False
        self.state: NodeState | None = None

    async def run(self, stop: StopSignal) -> bool:
        """Serve until asked to stop; return False if the engine ended before.

        Raises ConfigError if the engine cannot be used, or was not ready in time."""
        serve_metrics(self.address.app, self.metrics.registry, self._set_gauges)
        endpoints = Endpoints(self.address.node_id, lambda: self.state, lambda: self.draining)
        endpoints.mount(self.address.app, self._settings.role)
        self._media = MediaRoutes(
            self.address.app, self._engine.media,
            lambda: self.state.adapter_names if self.state and not self.draining else None,
        )  # fmt: skip
        self._clock.start()
        self.address.start()
        with contextlib.suppress(OSError):
            os.nice(PRIORITY)
        asked = asyncio.create_task(stop.asked.wait())
        try:
            loading = asyncio.create_task(self._load())
            await asyncio.wait({loading, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                loading.cancel()
                return True
            return await self._live(loading.result(), asked, stop)
        finally:
            asked.cancel()
            self._clock.stop()

    async def _live(self, state: NodeState, asked: asyncio.Task[bool], stop: StopSignal) -> bool:
        gone = asyncio.create_task(state.watch.gone.wait())
        joining = asyncio.create_task(self._join(state))
        await asyncio.wait({asked, gone}, return_when=asyncio.FIRST_COMPLETED)
        joining.cancel()
        if gone.done():
            log.critical("%s exits: the engine is gone: %s", self.address.node_id, state.watch.fault)
            await state.membership.leave(LAST_WORD_S)
            return False
        await self._drain(state, gone, stop)
        return True

    async def _load(self) -> NodeState:
        """Wait for the engine, measure it, and take an epoch."""
        facts = await self._ready_facts()
        require_role(facts, self._settings.role)
        media = self._settings.engine_modalities == "auto"
        measured = await measured_engine(self._engine, exact=facts.exact, media=media, kv_role=facts.kv_role)
        guarantees = measured.guarantees + measured.pooling.guarantees
        if self._settings.role == "prefill":
            await Measurement(self._engine).transfer()
        with contextlib.suppress(RegistryUnavailable):
            await self._store.check()
        epoch = await new_epoch(self._store, self.address.node_id)
        watch = EngineWatch(self._engine, facts.process, self._heard_at)
        streams = RouterStreams(epoch, self._pulse, self._router_lost, self._clock)
        if self._settings.accept_inexact:
            guarantees = tuple(dict.fromkeys((*guarantees, "greedy_resume", "seeded_resume")))
        state = self.state = NodeState(self._settings, self.address, facts, guarantees, epoch, watch)
        state.streams, state.modalities = streams, measured.modalities
        state.pooling = measured.pooling
        if "embed" in measured.pooling.tasks:
            state.pooled_by = await asyncio.to_thread(pooling_of, facts.model, self._settings.engine_pooling)
        parts = NodeParts(state, self._engine, self.metrics, self.mirror_metrics, self.address.secrets.token)
        if self._settings.role == "prefill":
            state.attempts = parts.prefill_attempts(self._clock)
        else:
            state.attempts = parts.decode_attempts()
        state.attempts.rates.rates = measured.rates
        state.draining = lambda: self.draining
        state.membership = Membership(self._store, state.lease, state.rows, self.metrics)
        state.follow_events()
        self.metrics.registry.model_name = state.served_names[0]
        streams.mount(self.address.app)
        watch.start()
        return state

    async def _ready_facts(self) -> EngineFacts:
        """Return the engine's facts once it answers and is well. Raises ConfigError if it is not ready in time."""
        deadline, told = time.monotonic() + self._settings.engine_timeout, ""
        while True:
            try:
                await self._engine.health()
                return await self._engine.facts()
            except ConfigError:
                raise
            except KvferryError as error:
                if error.message != told:
                    log.info("waiting for the engine: %s", error)
                told = error.message
            if time.monotonic() > deadline:
                raise ConfigError(f"the engine was not ready in {self._settings.engine_timeout:g} s: {told}")
            await asyncio.sleep(LOOK_S)

    async def _join(self, state: NodeState) -> None:
        await state.membership.join()
        facts = state.facts
        log.info("%s ready at %s for %s %s", self.address.node_id, self.address.url, facts.kind, facts.version)
        self._status.ready(
            self.address.url, model=model_name(facts), device=f"{facts.kind} {facts.version} at {self._settings.url}"
        )

    async def _drain(self, state: NodeState, gone: asyncio.Task[bool], stop: StopSignal) -> None:
        """Take nothing new, let running attempts finish, leave. They go on elsewhere once the limit is over."""
        may_wait = stop.patience(self._settings.drain_timeout)
        await state.membership.relief(lambda: may_wait() and state.streams.followed and not gone.done())
        self.draining = True
        log.info("%s drains", self.address.node_id)
        await state.membership.announce()
        while (state.attempts.running or self._media.running) and may_wait() and not gone.done():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        gone.cancel()
        state.watch.stop()
        if state.canary is not None:
            state.canary.stop()
        if state.mirroring is not None:
            await state.mirroring.stop()
        await state.membership.leave()
        state.streams.stop()
        await self.address.stop()
        await state.membership.close()
        await self._engine.close()

    def _router_lost(self, router_id: str) -> None:
        if self.state is not None:
            self.state.attempts.router_lost(router_id)

    def _heard_at(self) -> float:
        return self.state.attempts.heard_at if self.state else 0.0

    def _pulse(self) -> Pulse:
        return Pulse(engine_s=self.state.watch.still_s) if self.state else Pulse()

    def _health(self) -> tuple[int, dict[str, object]]:
        if self.state is None:
            return 200, {"status": "loading", "role": self._settings.role}
        if self.state.watch.fault:
            return 503, {"status": "broken", "fault": self.state.watch.fault}
        status = "draining" if self.draining else "ready" if self.state.membership.held else "joining"
        return 200, {"status": status, "role": self._settings.role, "pulse": asdict(self._pulse())}

    def _unready(self) -> str:
        if self.state is None:
            return f"the engine at {self._settings.url} is not ready"
        if not self.state.membership.held:
            return f"it is not registered: {self.state.membership.trouble}"
        return "it is draining" if self.draining else self.state.watch.fault

    def _set_gauges(self) -> None:
        if self.state is not None:
            self.state.set_gauges(self.metrics, self.mirror_metrics)
