"""Lifecycle of a node that transcribes speech: loads the model, joins the cluster, serves and drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import asdict

from kvferry.cluster_state.redis_store import RedisStore
from kvferry.cluster_state.seal import Seal
from kvferry.model_files.model_name import split_names
from kvferry.protocol.errors import RegistryUnavailable
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.speech_metrics import SpeechMetrics
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.runtime.http import serve_metrics
from kvferry.runtime.signals import StopSignal
from kvferry.runtime.supervisor_status import SupervisorStatus
from kvferry.speech_worker.assembly import assemble_speech
from kvferry.speech_worker.runtime import SpeechRuntime
from kvferry.worker.journal_relay import JournalRelay
from kvferry.worker.lease_relay import LeaseRelay
from kvferry.worker.membership import new_epoch
from kvferry.worker.node_address import NodeAddress

log = logging.getLogger("kvferry.worker")


class SpeechNode:
    """One node in this process. It answers HTTP from the start of `run`, and belongs to one asyncio loop.

    Raises ConfigError when the settings cannot be used. die: ends the process at once, from any thread."""

    def __init__(self, settings: WorkerSettings, die: Callable[[], None]) -> None:
        self._settings, self._exit = settings, die
        self.metrics = WorkerMetrics(settings.role)
        self._speech = SpeechMetrics(self.metrics.registry)
        self.address = NodeAddress(settings, self._health, self._unready)
        self._status = SupervisorStatus.from_fd(settings.status_fd)
        self._store = RedisStore(
            settings.redis_url, settings.cluster, password_file=settings.redis_password_file,
            seal=Seal(self.address.secrets.registry_keys),
        )  # fmt: skip
        self._progress = 0.0
        self.loaded: SpeechRuntime | None = None

    async def run(self, stop: StopSignal) -> bool:
        """Load, join, serve until stopped, drain; return False if a thread ended or hangs. Raises ConfigError."""
        serve_metrics(self.address.app, self.metrics.registry, self._set_gauges)
        LeaseRelay(self._store.records).mount(self.address.app)
        JournalRelay(self._store.journals).mount(self.address.app)
        self.address.start()
        stopping = asyncio.create_task(stop.requested.wait())
        loading = asyncio.create_task(self._load())
        try:
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                loading.cancel()
                return True
            return await self._serve(loading.result(), stopping, stop)
        finally:
            stopping.cancel()
            if self.loaded is None or not self.loaded.fault:
                await self.address.stop()
            log.info("%s has ended", self.address.node_id)

    async def _serve(self, loaded: SpeechRuntime, stopping: asyncio.Task[bool], stop: StopSignal) -> bool:
        broken = asyncio.create_task(loaded.broken.wait())
        joining = asyncio.create_task(self._join(loaded))
        await asyncio.wait({stopping, broken}, return_when=asyncio.FIRST_COMPLETED)
        joining.cancel()
        if broken.done():
            await loaded.abandon()
            return False
        await loaded.drain(stop)
        broken.cancel()
        return True

    async def _join(self, loaded: SpeechRuntime) -> None:
        await loaded.membership.join()
        log.info("%s ready at %s", self.address.node_id, self.address.url)
        self._status.ready(self.address.url, **loaded.description)

    async def _load(self) -> SpeechRuntime:
        with contextlib.suppress(RegistryUnavailable):
            await self._store.check()
        parts = await asyncio.to_thread(assemble_speech, self._settings, self._on_progress)
        (names,) = split_names(self._settings.served_model_name, 1)
        self.metrics.registry.model_name = names[0] if names else parts.source.name
        epoch = await new_epoch(self._store, self.address.node_id)
        self.loaded = SpeechRuntime(
            self._settings, self.address, self.metrics, self._speech, self._store, parts, epoch, self._exit
        )
        return self.loaded

    def _on_progress(self, share: float) -> None:
        self._progress = share
        self._status.loading(share)

    def _health(self) -> tuple[int, dict[str, object]]:
        body: dict[str, object] = {"progress": self._progress, "role": self._settings.role}
        if self.loaded is None:
            return 200, {"status": "loading", **body}
        if self.loaded.fault:
            return 503, {"status": "broken", "fault": self.loaded.fault, **body}
        status = "ready" if not self._unready() else "draining" if self.loaded.draining else "joining"
        return 200, {"status": status, "pulse": asdict(self.loaded.liveness.pulse), **body}

    def _unready(self) -> str:
        """Return why the node takes no new work; empty if it does."""
        if self.loaded is None:
            return f"the model is loading: {self._progress:.0%}"
        if self.loaded.draining:
            return "it is draining"
        if not self.loaded.membership.held:
            return f"it is not registered: {self.loaded.membership.trouble}"
        return self.loaded.fault or ""

    def _set_gauges(self) -> None:
        if self.loaded is not None:
            self.loaded.set_gauges()
