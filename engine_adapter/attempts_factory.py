"""Factory of the object that runs an adapter's attempts, by its role: prefill, prefill in rooms, or decode."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvferry.engine_adapter.attempts import Attempts
from kvferry.engine_adapter.engine import Engine, RoomEngine, TransferEngine
from kvferry.engine_adapter.handover_client import HandoverClient
from kvferry.engine_adapter.handover_receiver import Handovers
from kvferry.engine_adapter.handover_sender import BlockFacts, HandoverSender
from kvferry.engine_adapter.learned_rates import LearnedRates
from kvferry.engine_adapter.node_state import NodeState
from kvferry.engine_adapter.pooling_work import PoolingWork
from kvferry.engine_adapter.prefill_attempts import PrefillAttempts
from kvferry.engine_adapter.room_prefills import RoomPrefills
from kvferry.engine_adapter.transfer_canary import TransferCanary
from kvferry.protocol.adapter_metrics import AdapterMetrics
from kvferry.protocol.messages import Deviation, Job, StepFrame
from kvferry.protocol.process_names import NodeName
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.runtime.suspend_aware_clock import SuspendAwareClock
from kvferry.runtime.tls import worker_tls


@dataclass(frozen=True)
class AttemptsFactory:
    """Makes the parts of a node for its state. token: returns the cluster's secret."""

    state: NodeState
    engine: Engine
    metrics: WorkerMetrics
    adapter_metrics: AdapterMetrics
    token: Callable[[], str]

    @property
    def _name(self) -> NodeName:
        return self.state.address.node_id, self.state.epoch

    @property
    def _common(self) -> dict[str, Any]:
        state = self.state
        return {
            "suspect": state.watch.confirm,
            "sent": state.sent,
            "ended": state.ended,
            "counted": lambda outcome: self.metrics.attempts[outcome].inc(),
        }

    def prefill_attempts(self, clock: SuspendAwareClock) -> PrefillAttempts:
        """Return the attempts of a prefill node. clock: excludes the time during which this process was suspended."""
        state, settings = self.state, self.state.settings
        client = HandoverClient(self.token, worker_tls(settings.worker_ca_certs, settings.worker_server_name))
        blocks = BlockFacts(state.facts.block_size, state.block_bytes, settings.kv_lease)
        began, awake = time.monotonic(), clock.now()
        if isinstance(self.engine, RoomEngine):
            host = urlsplit(state.address.url).hostname or ""
            sender = HandoverSender(client, self._name, blocks, LearnedRates())
            return RoomPrefills(self.engine, sender, host, state.adapter_names, **self._common)
        assert isinstance(self.engine, TransferEngine)
        return PrefillAttempts(
            self.engine,
            HandoverSender(client, self._name, blocks, LearnedRates()),
            state.guarantees,
            state.adapter_names,
            suspended_s=lambda: (time.monotonic() - began) - (clock.now() - awake),
            **self._common,
        )

    def decode_attempts(self) -> Attempts:
        """Return the attempts of a decode node; its state gets handovers if the engine fetches blocks from others."""
        state, streams = self.state, self.state.streams
        names, pooling = state.adapter_names, PoolingWork(self.engine.pooling, state.pooling, state.pooled_by)
        if not state.transfer:
            return Attempts(self.engine, streams, state.guarantees, names, pooling, **self._common)

        if state.transfer == "rooms":  # an engine that only decodes cannot compute a prompt again for a canary
            attempts = Attempts(self.engine, streams, (), names, pooling, **self._common)
            state.handovers = Handovers(self._name, attempts.start, self._exact, self.adapter_metrics.refused.inc)
            return attempts

        def report(router_id: str, deviation: Deviation) -> None:
            streams.publish(router_id, StepFrame(deviations=(deviation,)))

        canary = state.canary = TransferCanary(
            self.engine, state.settings.canary_rate, state.guarantees, report, self._counted
        )
        attempts = Attempts(
            self.engine, streams, state.guarantees, names, pooling, arrived=canary.arrived, **self._common
        )  # fmt: skip
        state.handovers = Handovers(self._name, attempts.start, self._exact, self.adapter_metrics.refused.inc)
        return attempts

    def _exact(self, job: Job) -> bool:
        """Return whether two engines of this kind draw the same token from the same blocks, in any batch."""
        kept = self.state.guarantees
        return "batch_invariant" in kept and (job.params.temperature == 0 or "seeded_replay" in kept)

    def _counted(self, outcome: str, sender: NodeName) -> None:
        self.metrics.canary.checks[outcome].inc()
        if outcome == "differed":
            self.metrics.canary.deviations.labels(self.metrics.role, sender[0]).inc()
