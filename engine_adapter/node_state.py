"""State of an adapter that has found its engine: its parts, its load, and the lease that it publishes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.engine_adapter.attempts import Attempts
from kvferry.engine_adapter.block_bytes import block_bytes
from kvferry.engine_adapter.engine import EngineCall, EngineFacts, KvEventSource
from kvferry.engine_adapter.engine_watch import EngineWatch
from kvferry.engine_adapter.handover_receiver import Handovers
from kvferry.engine_adapter.identity import adapter_names, fingerprint, model_name
from kvferry.engine_adapter.measured_pooling import NO_POOLING, MeasuredPooling
from kvferry.engine_adapter.mirroring import Mirroring
from kvferry.engine_adapter.prefill_attempts import PrefillAttempts
from kvferry.engine_adapter.transfer_canary import TransferCanary
from kvferry.model_files.model_name import split_names
from kvferry.protocol.adapter_metrics import AdapterMetrics
from kvferry.protocol.adapters import AdapterName
from kvferry.protocol.layout import blocks_for
from kvferry.protocol.lease import Load, NodeLease
from kvferry.protocol.messages import Job, Pulse
from kvferry.protocol.node_settings import AdapterSettings
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.worker.membership import Membership
from kvferry.worker.node_address import NodeAddress
from kvferry.worker.scaling_signals import WAIT_S, decode_pressure
from kvferry.worker.streams import RouterStreams

log = logging.getLogger("kvferry.adapter")

ASSUMED_SEQS = 256
"""Concurrent requests assumed for an engine that does not report its limit."""


@dataclass(slots=True)
class ContinuedStreams:
    """Counts of streams continued after another node's tokens. suppressed: tokens computed again, not delivered."""

    resumed: int = 0
    replayed: int = 0
    suppressed: int = 0

    def sent(self, delivered: int, *, resumed: bool) -> None:
        """Count a call to the engine for a stream with `delivered` tokens."""
        if resumed:
            self.resumed += 1
        else:
            self.replayed += 1
            self.suppressed += delivered


@dataclass
class NodeState:
    """Parts of an adapter that has found its engine.

    settings: include the current role. role_at: when the node took it, in monotonic seconds; 0: at its start.
    mirroring: None for an engine without KV events. handovers: None for one that fetches no blocks from others.
    pooled_by: see `PoolingWork`."""

    settings: AdapterSettings
    address: NodeAddress
    facts: EngineFacts
    guarantees: tuple[str, ...]
    epoch: int
    watch: EngineWatch
    attempts: Attempts | PrefillAttempts = field(init=False)
    streams: RouterStreams = field(init=False)
    membership: Membership = field(init=False)
    draining: Callable[[], bool] = field(init=False)
    mirroring: Mirroring | None = None
    handovers: Handovers | None = None
    canary: TransferCanary | None = None
    continued: ContinuedStreams = field(default_factory=ContinuedStreams)
    modalities: tuple[str, ...] = ()
    pooling: MeasuredPooling = NO_POOLING
    pooled_by: str = ""
    role_at: float = 0.0

    def __post_init__(self) -> None:
        reported, known = self.settings.kv_transfer, self.facts.kv_transfer
        if reported == "auto" and self.settings.role == "prefill":
            known = known or "nixl"  # measured at start; a node without it does not join
        self.transfer = known if reported == "auto" else reported.replace("none", "")
        self.adapters: tuple[AdapterName, ...] = adapter_names(self.facts, self.settings.engine_revision)
        (given,) = split_names(self.settings.served_model_name, 1)
        self.served_names = given or self.facts.served_names
        self.fingerprint = fingerprint(self.facts, self.settings.engine_revision, self.transfer)
        self.block_bytes = block_bytes(self.facts, self.settings.kv_bytes_per_token) if self.transfer else 0
        seqs = self.facts.max_num_seqs or ASSUMED_SEQS
        self.total_blocks = self.facts.total_blocks or seqs * blocks_for(
            min(self.facts.max_model_len, 4096), self.facts.block_size
        )

    @property
    def engine(self) -> str:
        """Return kind and version of the engine."""
        return f"{self.facts.kind} {self.facts.version}".strip()

    @property
    def kv_events(self) -> KvEventSource | None:
        """Return where the engine publishes KV events: from the settings, else as the engine reports."""
        if self.settings.kv_events:
            return KvEventSource(self.settings.kv_events, self.settings.kv_events_replay)
        return self.facts.kv_events

    @property
    def adapter_names(self) -> dict[str, str]:
        """Return the names of LoRA adapters by their ids."""
        return {each.id: each.name for each in self.adapters}

    def follow_events(self) -> None:
        """Begin to mirror the engine's cache, if it publishes KV events. Raises ConfigError without pyzmq."""
        if (source := self.kv_events) is None:
            log.warning("the engine publishes no KV events: its cache is known only from what was sent to it")
            return
        self.mirroring = Mirroring(
            self.facts,
            source,
            self.fingerprint,
            {each.name: each.id for each in self.adapters},
            note=self.membership.note,
            lost=self.watch.end,
        )
        self.guarantees = (*self.guarantees, "kv_events")
        self.mirroring.start()

    def rows(self) -> Sequence[bytes]:
        """Return the rows of all blocks that the engine is known to cache."""
        return self.mirroring.mirror.rows() if self.mirroring else ()

    def sent(self, job: Job, call: EngineCall) -> None:
        """Note a call that goes to the engine."""
        if (delivered := len(job.token_ids) - job.prompt_len) > 0:
            self.continued.sent(delivered, resumed=len(call.token_ids) > job.prompt_len)
        if self.mirroring:
            self.mirroring.sent(job, call)

    def ended(self, job: Job, cached: int | None) -> None:
        """Note the end of a call."""
        if self.mirroring:
            self.mirroring.ended(job, cached)

    @property
    def load(self) -> Load:
        """Return the load in kvferry's terms. Includes requests of other clients of the engine."""
        reported, total = self.watch.load, self.total_blocks
        pinned = self.attempts.pinned.blocks if isinstance(self.attempts, PrefillAttempts) else 0
        active = min(total, max(pinned, round(reported.cache_usage * total)))
        cached = min(self.mirroring.mirror.blocks if self.mirroring else 0, total - active)
        running = max(reported.running_requests, self.attempts.running - reported.waiting_requests)
        return Load(
            waiting_requests=reported.waiting_requests,
            waiting_tokens=self.attempts.waiting_tokens,
            running_requests=running,
            free_blocks=total - active - cached,
            active_blocks=active,
            cached_blocks=cached,
            total_blocks=total,
        )

    @property
    def pressure(self) -> float:
        """Return the number of decode nodes that the engine's requests would fill; 0 for a prefill node.

        An engine does not report how long requests wait, so each waiting request counts in full."""
        if self.settings.role != "decode":
            return 0.0
        return decode_pressure(self.load, self.facts.max_num_seqs or ASSUMED_SEQS, latency=0.0, waits_s=WAIT_S)

    async def end(self) -> None:
        """End this role's parts: canaries, mirror, lease and token streams. The engine is still watched."""
        if self.canary is not None:
            self.canary.stop()
        if self.mirroring is not None:
            await self.mirroring.stop()
        await self.membership.leave()
        self.streams.stop()

    def lease(self) -> NodeLease:
        """Return the node's current lease."""
        facts = self.facts
        return NodeLease(
            node_id=self.address.node_id,
            role=self.settings.role,
            epoch=self.epoch,
            state="draining" if self.draining() else "ready",
            http_url=self.address.url,
            link_address=self.address.url if self.handovers else "",
            fingerprint=self.fingerprint,
            model=model_name(facts),
            max_model_len=facts.max_model_len,
            block_size=facts.block_size,
            block_bytes=self.block_bytes,
            load=self.load,
            rates=self.attempts.rates.rates,
            served_names=self.served_names,
            max_num_seqs=facts.max_num_seqs or ASSUMED_SEQS,
            adapters=self.adapters,
            pulse=Pulse(engine_s=self.watch.still_s),
            engine=self.engine,
            engine_url=self.settings.url,
            guarantees=self.guarantees,
            modalities=self.modalities,
            elastic=self.settings.elastic,
            role_s=max(1e-3, time.monotonic() - self.role_at) if self.role_at else 0.0,
            pressure=self.pressure,
        )

    def set_gauges(self, metrics: WorkerMetrics, of_engine: AdapterMetrics) -> None:
        """Set the gauges of load, scaling, index rows, engine and mirror."""
        if self.mirroring:
            self.mirroring.set_gauges(of_engine)
        self._set_engine_gauges(of_engine)
        if isinstance(self.attempts, PrefillAttempts):
            of_engine.pinned_blocks.set(self.attempts.pinned.blocks)
            of_engine.pinned_prompts.set(self.attempts.pinned.prompts)
        load = self.load
        metrics.scaling.decode_pressure.set(self.pressure)
        metrics.requests_waiting.set(load.waiting_requests)
        metrics.waiting_tokens.set(load.waiting_tokens)
        metrics.requests_running.set(load.running_requests)
        for state in ("free", "active", "cached", "granted"):
            metrics.kv_blocks[state].set(getattr(load, f"{state}_blocks"))
        metrics.kv_blocks_total.set(load.total_blocks)
        self.membership.set_gauges()

    def _set_engine_gauges(self, metrics: AdapterMetrics) -> None:
        metrics.engine_up.set(not self.watch.fault and not self.watch.still_s)
        metrics.epoch.labels(self.engine).set(self.epoch)
        for name, gauge in metrics.guarantees.items():
            gauge.set(name in self.guarantees)
        for way, gauge in metrics.continued.items():
            gauge.set(getattr(self.continued, way))
        metrics.swallowed.set(self.continued.suppressed)
