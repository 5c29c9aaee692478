"""Node process of any LLM role: loads the model, joins the cluster, serves and drains; its HTTP server runs throughout.

Routers can find a node that is ready. If Redis is away long enough for the lease to expire, the node is joining again;
it still serves routers that know it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum, auto

from kvferry.cluster_state.redis_store import RedisStore
from kvferry.cluster_state.seal import Seal
from kvferry.model_files.model_name import split_names
from kvferry.protocol.errors import RegistryUnavailable
from kvferry.protocol.lease import Rates
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.runtime.http import serve_metrics
from kvferry.runtime.signals import StopSignal
from kvferry.runtime.supervisor_status import SupervisorStatus
from kvferry.worker.engine_factory import assemble
from kvferry.worker.engine_parts import EngineParts, describe
from kvferry.worker.journal_relay import JournalRelay
from kvferry.worker.kv_events.config import read_kv_events_config
from kvferry.worker.lease_relay import LeaseRelay
from kvferry.worker.membership import new_epoch, withdraw_now
from kvferry.worker.node_address import NodeAddress
from kvferry.worker.ranks import Ranks
from kvferry.worker.rates import warm_up
from kvferry.worker.runtime import WorkerRuntime
from kvferry.worker.service import MakeService
from kvferry.worker.tier_factory import OpenTiers, open_tiers

log = logging.getLogger("kvferry.worker")

STOP_POLL_S = 0.5
"""Seconds between two checks of whether another host of the node was asked to stop."""


class Ending(Enum):
    """End of a node: drained, stopped before its model was loaded, or failed.

    UNLOADED: the loading thread still runs. BROKEN: threads, connections and requests are left as they are."""

    DRAINED = auto()
    UNLOADED = auto()
    BROKEN = auto()


class Node:
    """One node in this process: it loads the model, joins the cluster, serves and drains.

    It answers HTTP from the start of `run`; `loaded` is set once the model is loaded. It belongs to one asyncio loop.
    Raises ConfigError when the settings cannot be used. die: ends the process at once, from any thread, when a thread
    hangs and the asyncio loop cannot end the node; None: the process has other uses than the node."""

    def __init__(
        self, settings: WorkerSettings, make_service: MakeService, die: Callable[[], None] | None = None
    ) -> None:
        read_kv_events_config(settings.kv_events_config)  # a mistake ends the process before the model is loaded
        self.metrics = WorkerMetrics(settings.role)
        self.address = NodeAddress(settings, self._health, self._unready)
        self.metrics.registry.model_name = _first_name(settings)
        self.loaded: WorkerRuntime | None = None
        self._settings = settings
        self._make_service, self._die = make_service, die
        self._progress = 0.0
        self._status = SupervisorStatus.from_fd(settings.status_fd)
        self._store = self._connected()

    @property
    def state(self) -> str:
        """Return loading, joining, ready, draining or broken."""
        if self.loaded is None:
            return "loading"
        if self.loaded.fault is not None:
            return "broken"
        return "joining" if self.loaded.state == "ready" and self.loaded.absence else self.loaded.state

    async def run(self, stop: StopSignal) -> Ending:
        """Load, join, serve until asked to stop, drain. Raises ConfigError when the node cannot start."""
        serve_metrics(self.address.app, self.metrics.registry, self._set_gauges)
        LeaseRelay(self._store.records).mount(self.address.app)
        JournalRelay(self._store.journals).mount(self.address.app)
        self.address.start()
        stopping = asyncio.create_task(stop.requested.wait())
        ending = Ending.UNLOADED
        try:
            if await _first(asyncio.create_task(self._load()), stopping):
                assert self.loaded
                ending = await self._live(self.loaded, stopping, stop)
        finally:
            stopping.cancel()
            if ending is not Ending.BROKEN:
                await self.address.stop()
            log.info("%s has ended", self.address.node_id)
        return ending

    async def _live(self, loaded: WorkerRuntime, stopping: asyncio.Task[bool], stop: StopSignal) -> Ending:
        """Join and serve until this or another host is asked to stop, then drain; on a fault, abandon the node."""
        broken = asyncio.create_task(loaded.broken.wait())
        joining, leaving = (
            asyncio.create_task(self._join(loaded)),
            asyncio.create_task(_wait_host_leaving(loaded.parts.ranks)),
        )
        await asyncio.wait({stopping, broken, leaving}, return_when=asyncio.FIRST_COMPLETED)
        joining.cancel()
        leaving.cancel()
        if not broken.done() and await _first(asyncio.create_task(loaded.drain(stop)), broken):
            broken.cancel()
            return Ending.DRAINED
        await loaded.abandon()
        return Ending.BROKEN

    async def _join(self, loaded: WorkerRuntime) -> None:
        await loaded.join()
        log.info("%s ready at %s, link %s", self.address.node_id, self.address.url, loaded.link.address)
        self._status.ready(self.address.url, **describe(loaded.parts), link=loaded.link.address)

    async def _load(self) -> None:
        with contextlib.suppress(RegistryUnavailable):
            await self._store.check()
        parts, seed, tiers = await asyncio.to_thread(self._build)
        self.metrics.registry.model_name = _first_name(self._settings) or parts.info.name
        epoch = await new_epoch(self._store, self.address.node_id)
        self.loaded = WorkerRuntime(
            self._settings,
            self.address,
            self.metrics,
            self._store,
            parts,
            seed,
            tiers,
            epoch,
            self._make_service,
            self._force_exit if self._die else None,
        )

    def _force_exit(self, fault: str) -> None:
        """Withdraw the lease over a separate connection and end the process.

        Called on another thread when the asyncio loop hangs too."""
        assert self._die
        assert self.loaded
        log.critical("%s exits at once: %s", self.address.node_id, fault)
        lease = self.loaded.lease()
        with contextlib.suppress(Exception):
            asyncio.run(withdraw_now(self._connected(), lease))
        self._die()

    def _connected(self) -> RedisStore:
        settings = self._settings
        seal = Seal(self.address.secrets.registry_keys)
        return RedisStore(settings.redis_url, settings.cluster, password_file=settings.redis_password_file, seal=seal)

    def _build(self) -> tuple[EngineParts, Rates, OpenTiers]:
        parts = assemble(self._settings, self._on_progress)
        rates = Rates() if self._settings.role == "encode" else warm_up(parts.engine)
        return parts, rates, open_tiers(self._settings, parts)

    def _on_progress(self, share: float) -> None:
        self._progress = share
        self._status.loading(share)

    def _health(self) -> tuple[int, dict[str, object]]:
        fault = self.loaded.fault if self.loaded else None
        body: dict[str, object] = {"status": self.state, "progress": self._progress}
        if self.loaded:
            body |= {"role": self.loaded.roles.now, "pulse": asdict(self.loaded.liveness.pulse)}
        return (200, body) if fault is None else (503, {**body, "fault": fault})

    def _unready(self) -> str:
        """Return why the node takes no new work; empty if it does."""
        if self.loaded is None:
            return f"the model is loading: {self._progress:.0%}"
        if self.state == "joining":
            return f"it is not registered: {self.loaded.absence}"
        return "" if self.state == "ready" else self.loaded.fault or f"it is {self.state}"

    def _set_gauges(self) -> None:
        if self.loaded:
            self.loaded.set_gauges()


def _first_name(settings: WorkerSettings) -> str:
    """Return the first name of --served-model-name; empty without one."""
    (names,) = split_names(settings.served_model_name, 1)
    return names[0] if names else ""


async def _wait_host_leaving(ranks: Ranks | None) -> None:
    """Return once another host of the node was asked to stop; without other ranks, never return."""
    if ranks is None:
        await asyncio.Event().wait()
    while ranks is not None and not ranks.leaving:  # noqa: ASYNC110 - set by another thread
        await asyncio.sleep(STOP_POLL_S)


async def _first(work: asyncio.Task[None], other: asyncio.Task[bool]) -> bool:
    """Return True once the work is done, or False and cancel it if `other` is done first. Raises the work's error."""
    await asyncio.wait({work, other}, return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        work.result()
        return True
    work.cancel()
    return False
