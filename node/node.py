"""One node, from its settings to its end: loading, ready, draining."""

from __future__ import annotations

import asyncio
import logging

from cluster_state.redis_store import RedisStore
from node.assembly import Assembled, assemble
from node.face import Face
from node.loaded import Loaded
from node.rates import warm_up
from node.service import MakeService
from process.http import serve_metrics
from process.signals import Stop
from process.status import Status
from protocol.messages import Rates
from protocol.metrics import WorkerMetrics
from protocol.settings import WorkerSettings

log = logging.getLogger("kvferry.node")


class Node:
    """Answers over HTTP from the start of `run`; `loaded` is there once its model is. Belongs to one asyncio loop.
    Raises ConfigError when the settings cannot be used."""

    def __init__(self, settings: WorkerSettings, make_service: MakeService) -> None:
        self.metrics = WorkerMetrics(settings.role)
        self.face = Face(settings, self._health, lambda: self.state == "ready")
        self.loaded: Loaded | None = None
        self._settings = settings
        self._make_service = make_service
        self._progress = 0.0
        self._status = Status.from_fd(settings.status_fd)
        self._store = RedisStore(settings.redis_url, settings.cluster)

    @property
    def state(self) -> str:
        return self.loaded.state if self.loaded else "loading"

    async def run(self, stop: Stop) -> bool:
        """Load, serve until asked to stop, drain. Asked while still loading it returns False at once, and leaves the
        thread that loads behind. Raises ConfigError when the node cannot start."""
        serve_metrics(self.face.app, self.metrics.registry, self._set_gauges)
        self.face.start()
        loading, asked = asyncio.create_task(self._load()), asyncio.create_task(stop.asked.wait())
        try:
            await asyncio.wait({loading, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                return False
            loaded = loading.result()
            log.info("%s ready at %s, link %s", self.face.node_id, self.face.url, loaded.link.address)
            self._status.ready(self.face.url)
            await asked
            await loaded.drain(stop)
            return True
        finally:
            asked.cancel()
            await self.face.stop()
            log.info("%s has ended", self.face.node_id)

    async def _load(self) -> Loaded:
        parts, seed = await asyncio.to_thread(self._build)
        self.loaded = Loaded(self._settings, self.face, self.metrics, self._store, parts, seed, self._make_service)
        await self.loaded.join()
        return self.loaded

    def _build(self) -> tuple[Assembled, Rates]:
        parts = assemble(self._settings, self._on_progress)
        return parts, warm_up(parts.engine)

    def _on_progress(self, share: float) -> None:
        self._progress = share
        self._status.loading(share)

    def _health(self) -> tuple[int, dict[str, object]]:
        fault = self.loaded.fault if self.loaded else None
        body: dict[str, object] = {"status": self.state, "progress": self._progress}
        return (200, body) if fault is None else (503, {**body, "fault": fault})

    def _set_gauges(self) -> None:
        if self.loaded:
            self.loaded.set_gauges()
