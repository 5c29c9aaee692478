"""Running speech node with a loaded model: engine thread, routes, lease and watchdog, from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import torch

from kvferry.cluster_state.redis_store import RedisStore
from kvferry.model_files.model_name import split_names
from kvferry.protocol.lease import Load, NodeLease
from kvferry.protocol.media import TRANSCRIPTION
from kvferry.protocol.settings import WorkerSettings
from kvferry.protocol.speech_metrics import SpeechMetrics
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.runtime.signals import StopSignal
from kvferry.runtime.suspend_aware_clock import LoopClock
from kvferry.speech_worker.assembly import SpeechParts
from kvferry.speech_worker.liveness import SpeechLiveness
from kvferry.speech_worker.service import SpeechService
from kvferry.worker.media_routes import MediaRoutes
from kvferry.worker.membership import WITHDRAW_S, Membership
from kvferry.worker.node_address import NodeAddress
from kvferry.worker.pool_memory import GIB
from kvferry.worker.scaling_signals import WAIT_S, decode_pressure
from kvferry.worker.streams import RouterStreams
from kvferry.worker.watchdog import Watchdog

log = logging.getLogger("kvferry.worker")


class SpeechRuntime:
    """Running parts of a node whose model is loaded. They belong to one asyncio loop.

    broken: set when a thread has ended or hangs. The node's token streams carry only heartbeats."""

    def __init__(
        self,
        settings: WorkerSettings,
        address: NodeAddress,
        metrics: WorkerMetrics,
        speech: SpeechMetrics,
        store: RedisStore,
        parts: SpeechParts,
        epoch: int,
        die: Callable[[], None],
    ) -> None:
        self._settings, self._address, self._metrics, self._speech = settings, address, metrics, speech
        self._parts, self._epoch, self._drawn = parts, epoch, 0
        (self._served_names,) = split_names(settings.served_model_name, 1)
        self.draining, self.broken = False, asyncio.Event()
        loop, self._clock = asyncio.get_running_loop(), LoopClock()
        self.liveness = SpeechLiveness(parts.model.loop, self._clock)
        self.service = SpeechService(parts.model, speech, settings.max_num_seqs, settings.max_audio_seconds)
        self._routes = MediaRoutes(address.app, self.service, lambda: None if self.draining else {})
        self._streams = RouterStreams(epoch, lambda: self.liveness.pulse, lambda router: None, self._clock)
        self._streams.mount(address.app)
        self.membership = Membership(store, self.lease, list, metrics)

        def on_fault() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.broken.set)

        def force_exit(fault: str) -> None:
            log.critical("%s exits at once: %s", address.node_id, fault)
            die()

        self._watchdog = Watchdog(self.liveness, on_fault, force_exit, of_process=True)
        parts.model.loop.start()
        self._clock.start()
        self._watchdog.start()

    @property
    def fault(self) -> str | None:
        """Return why the process must end; None: no fault."""
        return self.liveness.fault

    @property
    def description(self) -> dict[str, str]:
        """Describe the node's model, device and pool for a person."""
        loop, layout = self._parts.model.loop, self._parts.layout
        on_cpu = self._parts.device.type == "cpu"
        return {
            "model": self._parts.source.name,
            "task": TRANSCRIPTION,
            "device": f"cpu, threads: {torch.get_num_threads()}" if on_cpu else str(self._parts.device),
            "kv_pool": f"{loop.blocks * layout.block_bytes / GIB:.2f} GiB, {loop.windows} windows of speech",
        }

    def lease(self) -> NodeLease:
        """Return the node's current lease."""
        parts = self._parts
        return NodeLease(
            node_id=self._address.node_id,
            role=self._settings.role,
            epoch=self._epoch,
            state="draining" if self.draining else "ready",
            http_url=self._address.url,
            link_address="",
            fingerprint=parts.fingerprint,
            model=parts.source.name,
            max_model_len=parts.model.config.context,
            block_size=parts.layout.block_size,
            block_bytes=parts.layout.block_bytes,
            load=self._load,
            served_names=self._served_names,
            max_num_seqs=self._settings.max_num_seqs,
            pulse=self.liveness.pulse,
            modalities=(TRANSCRIPTION,),
            pressure=self._pressure,
        )

    @property
    def _load(self) -> Load:
        loop, service = self._parts.model.loop, self.service
        return Load(
            waiting_requests=service.waiting,
            running_requests=service.running,
            free_blocks=loop.free_blocks,
            active_blocks=loop.blocks - loop.free_blocks,
            total_blocks=loop.blocks,
        )

    @property
    def _pressure(self) -> float:
        return decode_pressure(self._load, self._settings.max_num_seqs, latency=0.0, waits_s=WAIT_S)

    async def drain(self, stop: StopSignal) -> None:
        """Accept no new work, finish running files within `drain_timeout`, leave the cluster and stop.

        The last node of its model first continues to serve until another is ready, unless it is being restarted."""
        may_wait = stop.drain_window(self._settings.drain_timeout)
        if not self._settings.respawned:
            await self.membership.wait_for_replacement(lambda: may_wait() and self._streams.followed)
        self.draining = True
        log.info("%s drains", self._address.node_id)
        if not stop.forced.is_set():
            await self.membership.announce()
        while self._routes.running and may_wait():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await self.membership.leave()
        self._watchdog.stop()
        self._clock.stop()
        self._streams.stop()
        await asyncio.to_thread(self._parts.model.loop.stop)
        self.service.close()
        await self.membership.close()

    async def abandon(self) -> None:
        """Withdraw the lease, if Redis answers at once, after a thread has ended or hangs."""
        log.critical("%s exits at once: %s", self._address.node_id, self.fault)
        await self.membership.leave(WITHDRAW_S)

    def set_gauges(self) -> None:
        """Set the gauges of load and scaling, and count the tokens since the last call."""
        load, loop = self._load, self._parts.model.loop
        self._metrics.requests_waiting.set(load.waiting_requests)
        self._metrics.requests_running.set(load.running_requests)
        self._metrics.scaling.decode_pressure.set(self._pressure)
        for state in ("free", "active", "cached", "granted"):
            self._metrics.kv_blocks[state].set(getattr(load, f"{state}_blocks"))
        self._metrics.kv_blocks_total.set(load.total_blocks)
        self._speech.tokens.inc(loop.tokens - self._drawn)
        self._drawn = loop.tokens
        self.membership.set_gauges()
