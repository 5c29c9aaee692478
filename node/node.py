"""One node, from its settings to its end: loading, joining, ready, draining.

Ready means that routers can find it: a node whose lease has lapsed, since Redis was away for longer, is joining again.
It is alive then, and goes on serving those who know it.
"""

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
        if self.loaded is None:
            return "loading"
        return "joining" if self.loaded.state == "ready" and not self.loaded.registered else self.loaded.state

    async def run(self, stop: Stop) -> bool:
        """Load, join, serve until asked to stop, drain. Asked while still loading it returns False at once, and leaves
        the thread that loads behind. Raises ConfigError when the node cannot start."""
        serve_metrics(self.face.app, self.metrics.registry, self._set_gauges)
        self.face.start()
        asked = asyncio.create_task(stop.asked.wait())
        try:
            if not await _first(asyncio.create_task(self._load()), asked):
                return False
            assert self.loaded
            if await _first(asyncio.create_task(self.loaded.join()), asked):
                log.info("%s ready at %s, link %s", self.face.node_id, self.face.url, self.loaded.link.address)
                self._status.ready(self.face.url)
                await asked
            await self.loaded.drain(stop)
            return True
        finally:
            asked.cancel()
            await self.face.stop()
            log.info("%s has ended", self.face.node_id)

    async def _load(self) -> None:
        parts, seed = await asyncio.to_thread(self._build)
        self.loaded = Loaded(self._settings, self.face, self.metrics, self._store, parts, seed, self._make_service)

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


async def _first(work: asyncio.Task[None], asked: asyncio.Task[bool]) -> bool:
    """Whether the work is done before the node is asked to stop; raises what it raised."""
    await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        work.result()
        return True
    work.cancel()
    return False
