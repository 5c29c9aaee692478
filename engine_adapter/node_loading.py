"""Builds an adapter's state at start and after a role change: waits for the engine, measures it, takes an epoch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvferry.cluster_state.redis_store import RedisStore
from kvferry.engine_adapter.attempts_factory import AttemptsFactory
from kvferry.engine_adapter.engine import ElasticEngine, Engine, EngineFacts
from kvferry.engine_adapter.engine_watch import EngineWatch
from kvferry.engine_adapter.identity import first_role
from kvferry.engine_adapter.measured_guarantees import Measurement
from kvferry.engine_adapter.measured_modalities import measured_modalities
from kvferry.engine_adapter.measured_pooling import NO_POOLING, MeasuredPooling, measured_pooling
from kvferry.engine_adapter.node_state import NodeState
from kvferry.engine_adapter.pooling_work import pooling_of
from kvferry.protocol.adapter_metrics import AdapterMetrics
from kvferry.protocol.errors import (
    ConfigError,
    InvalidRequest,
    KvferryError,
    NodeDown,
    NodeLost,
    RegistryUnavailable,
    StepFailed,
)
from kvferry.protocol.lease import Rates
from kvferry.protocol.media import TRANSCRIPTION
from kvferry.protocol.messages import Pulse
from kvferry.protocol.node_settings import AdapterSettings
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.runtime.suspend_aware_clock import LoopClock
from kvferry.worker.membership import Membership, new_epoch
from kvferry.worker.node_address import NodeAddress
from kvferry.worker.streams import RouterStreams

log = logging.getLogger("kvferry.adapter")

CHECK_S = 0.5
"""Seconds between two checks of an engine that is not ready yet."""


@dataclass
class NodeLoading:
    """Makes the states of one node, each with a new epoch. draining: returns whether it takes no new work.

    adapter_metrics: of the current state, as its role is a label of all metrics."""

    settings: AdapterSettings
    engine: Engine
    store: RedisStore
    address: NodeAddress
    metrics: WorkerMetrics
    clock: LoopClock
    draining: Callable[[], bool]
    adapter_metrics: AdapterMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.adapter_metrics = AdapterMetrics(self.metrics.registry)

    async def first(self) -> NodeState:
        """Wait for the engine and return the node's first state. Raises ConfigError if the engine cannot be used."""
        facts = await self._ready_facts()
        role = first_role(facts, self.settings.role, elastic=self.settings.elastic)
        if self.settings.elastic:
            await require_elastic(self.engine, role, self.settings.decode_graphs_gb)
        with contextlib.suppress(RegistryUnavailable):
            await self.store.check()
        watch = EngineWatch(self.engine, facts.process)
        state = await self._state(facts, role, watch)
        watch.start()
        return state

    async def next(self, before: NodeState, role: str) -> NodeState:
        """Return the state of a node whose engine has changed its role; the state before must have ended."""
        state = await self._state(await self.engine.facts(), role, before.watch)
        state.role_at, state.continued = time.monotonic(), before.continued
        return state

    async def _state(self, facts: EngineFacts, role: str, watch: EngineWatch) -> NodeState:
        """Measure the engine and take an epoch."""
        settings = replace(self.settings, role=role)
        media = settings.engine_modalities == "auto"
        measured = await measured_engine(self.engine, exact=facts.exact, media=media, kv_role=facts.kv_role)
        guarantees = measured.guarantees + measured.pooling.guarantees
        if role == "prefill":
            await Measurement(self.engine).transfer()
        epoch = await new_epoch(self.store, self.address.node_id)
        if settings.accept_inexact:
            guarantees = tuple(dict.fromkeys((*guarantees, "greedy_resume", "seeded_resume")))
        state = NodeState(settings, self.address, facts, guarantees, epoch, watch)
        state.modalities, state.pooling, state.draining = measured.modalities, measured.pooling, self.draining
        state.streams = RouterStreams(
            epoch, lambda: Pulse(engine_s=watch.still_s), lambda router: state.attempts.router_lost(router), self.clock
        )
        if "embed" in measured.pooling.tasks:
            state.pooled_by = await asyncio.to_thread(pooling_of, facts.model, settings.engine_pooling)
        if role != self.metrics.role:
            self.metrics.count_as(role)
            self.adapter_metrics = AdapterMetrics(self.metrics.registry)
        parts = AttemptsFactory(state, self.engine, self.metrics, self.adapter_metrics, self.address.secrets.token)
        state.attempts = parts.prefill_attempts(self.clock) if role == "prefill" else parts.decode_attempts()
        state.attempts.rates.rates = measured.rates
        watch.use_output_clock(lambda: state.attempts.last_output_at)
        state.membership = Membership(self.store, state.lease, state.rows, self.metrics)
        state.follow_events()
        self.metrics.registry.model_name = state.served_names[0]
        return state

    async def _ready_facts(self) -> EngineFacts:
        """Return the engine's facts once it answers and is well. Raises ConfigError if it is not ready in time."""
        deadline, reported = time.monotonic() + self.settings.engine_timeout, ""
        while True:
            try:
                await self.engine.health()
                return await self.engine.facts()
            except ConfigError:
                raise
            except KvferryError as error:
                if error.message != reported:
                    log.info("waiting for the engine: %s", error)
                reported = error.message
            if time.monotonic() > deadline:
                raise ConfigError(f"the engine was not ready within {self.settings.engine_timeout:g} s: {reported}")
            await asyncio.sleep(CHECK_S)


async def require_elastic(engine: Engine, role: str, graphs_gb: float) -> None:
    """Raise ConfigError unless the engine, which has this role, can change it."""
    if not isinstance(engine, ElasticEngine):
        raise ConfigError("this engine cannot change between prefill and decode; SGLang can", param="elastic")
    try:
        await engine.switch_role(role, graphs_gb)
    except (NodeDown, NodeLost):
        raise
    except KvferryError as error:
        raise ConfigError(
            f"the engine cannot change between prefill and decode ({error.message}): start SGLang with "
            "--enable-pd-role-switch, or the adapter without --elastic",
            param="elastic",
        ) from error


class MeasuredEngine(NamedTuple):
    """What an engine keeps, the media that it reads, its first rates, as in a lease, and what it makes of prompts."""

    guarantees: tuple[str, ...]
    modalities: tuple[str, ...]
    rates: Rates
    pooling: MeasuredPooling = NO_POOLING


NO_PREFILL = Rates(prefill_tokens_per_s=0.1)
"""Rates of an engine that only decodes: to routers it is a node that computes prompts very slowly."""


async def measured_engine(engine: Engine, *, exact: bool = True, media: bool, kv_role: str = "") -> MeasuredEngine:
    """Measure an idle engine. exact, kv_role: see EngineFacts; media: whether to measure those. Raises what it raises.

    An engine that only computes prompts or only decodes cannot generate: only its prompt rate is known.

    A model that transcribes may take no prompts without audio, and one that embeds may generate nothing: it has
    no guarantees, and its rates are unknown."""
    if kv_role == "decode":
        return MeasuredEngine((), (), NO_PREFILL)
    if kv_role == "prefill":
        return MeasuredEngine((), (), await Measurement(engine).rates())
    modalities = await measured_modalities(engine) if media else ()
    pooling = await measured_pooling(engine)
    measurement = Measurement(engine, exact=exact)
    try:
        return MeasuredEngine(await measurement.guarantees(), modalities, await measurement.rates(), pooling)
    except (InvalidRequest, StepFailed):
        if TRANSCRIPTION not in modalities and not pooling.tasks:
            raise
        return MeasuredEngine((), modalities, Rates(), pooling)
