"""Decode role of a node: its HTTP endpoints, and the flow of engine events to routers, receiver and senders.

It grants blocks to other nodes, takes over their requests, generates, and streams tokens to routers. It prefills
locally if a router asks for it, and fetches blocks of the prompt from other nodes. It replicates streams to buddy
nodes, and migrates them while it drains. Engine, receiver and sender call each other directly (`grants`, `replication`,
`migration_sender`, `worker.fetch_client`); everything here belongs to the asyncio loop."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import Request

from kvferry.decode_worker.grants import Grants
from kvferry.decode_worker.migration_sender import MigrationSender
from kvferry.decode_worker.replication import Replication
from kvferry.decode_worker.scale_out.api import ScaleOut
from kvferry.decode_worker.scale_out.vllm_metrics import VllmMetrics
from kvferry.decode_worker.trace_spans import TraceSpans
from kvferry.engine.events import CanaryChecked, Event, Failed, Generated
from kvferry.protocol.errors import Moved
from kvferry.protocol.messages import (
    AttemptFailed,
    CancelRequest,
    Deviation,
    GenerateRequest,
    Job,
    MoveRequest,
    StepFrame,
    TokenDelta,
)
from kvferry.protocol.worker_metrics import WorkerMetrics
from kvferry.runtime.http import read_message
from kvferry.worker.endpoints import Endpoints
from kvferry.worker.media_routes import read_attempt
from kvferry.worker.reuse_check import audit
from kvferry.worker.service import NodeParts


class DecodeService:
    """Service of a decode node: joins HTTP, the engine, the receiver and the senders.

    Implements `worker.service.Service`. endpoints: endpoints of the node, if they already exist."""

    def __init__(self, base: NodeParts, endpoints: Endpoints | None = None) -> None:
        self._base = base
        self._spans = TraceSpans()
        self._looks = CanaryLog(base.metrics)
        self.endpoints = endpoints or Endpoints(base)
        self._grants = Grants(base, self.endpoints.arrivals, self._spans.begin)
        self._migrations = MigrationSender(base, self.endpoints.sender)
        self._replication = Replication(base, self.endpoints.sender)
        self._scale_out = ScaleOut(base, self.accept) if base.settings.enable_scale_out else None
        self._vllm_metrics = VllmMetrics(base) if base.settings.vllm_metrics else None
        base.app.post("/attempts/generate", status_code=202)(self.post_generate)
        base.app.post("/attempts/move", status_code=202)(self.post_move)

    async def post_generate(self, request: Request) -> None:
        """Prefill an attempt locally and generate; its output goes to the router's stream."""
        self.accept((await read_attempt(request, GenerateRequest)).job)

    def accept(self, job: Job) -> None:
        """Submit a job that is prefilled here; raise Draining unless it may begin."""
        self._base.require("decode")
        self._spans.begin(job)
        self._base.engine.submit(lambda engine: self.endpoints.tiers.add(engine, job), urgent=job.newcomer)

    async def post_move(self, request: Request) -> None:
        """Migrate a stream to another decode node; answer once it has moved, or with the reason why it stays."""
        await self._migrations.move(await read_message(request, MoveRequest), request.is_disconnected)

    def cancel(self, cancel: CancelRequest) -> None:
        """Do nothing: the engine reports the attempts that end."""

    def busy(self) -> bool:
        answers = self.endpoints.media.busy() or (self._scale_out is not None and self._scale_out.busy())
        return answers or bool(self._base.engine.load.open_grants) or self._migrations.busy()

    def router_lost(self, router_id: str) -> None:
        self._base.engine.submit(lambda engine: engine.cancel_router(router_id))

    def stop(self) -> None:
        """End the answers of the API of token ids; the token streams end with the node."""
        if self._scale_out is not None:
            self._scale_out.stop()
        self.endpoints.stop()

    def to_link(self, events: Sequence[Event]) -> None:
        self._grants.take(events)
        self._migrations.take(events)
        self._replication.take(events)
        self.endpoints.take(events)

    def to_routers(self, events: Sequence[Event]) -> None:
        """Send each router its output of one engine turn as one frame."""
        outputs: defaultdict[str, _Output] = defaultdict(_Output)
        if self._vllm_metrics is not None:
            self._vllm_metrics.take(events)
        for event in events:
            if isinstance(event, Generated | Failed):
                self._spans.take(event)
            if isinstance(event, Generated):
                if event.delta.reuse is not None:
                    audit(event.delta, self._base.metrics)
                outputs[event.router_id].deltas.append(event.delta)
                if event.delta.finish_reason is not None:
                    self._base.metrics.attempts["done"].inc()
            elif isinstance(event, Failed):
                outputs[event.router_id].failed.append(self._failure(event))
            elif isinstance(event, CanaryChecked) and self._looks.differs(event):
                outputs[event.router_id].deviations.append(Deviation(event.key[0], event.sender))
        for router_id, output in outputs.items():
            self._base.streams.publish(router_id, output.frame())

    def _failure(self, event: Failed) -> AttemptFailed:
        code = event.error.code
        self._base.metrics.attempts[code if code in ("cancelled", "moved") else "failed"].inc()
        later = event.error.later if isinstance(event.error, Moved) else -1
        return AttemptFailed(*event.key, code, event.error.message, later)


@dataclass(slots=True)
class _Output:
    """Output of one engine turn for one router."""

    deltas: list[TokenDelta] = field(default_factory=list)
    failed: list[AttemptFailed] = field(default_factory=list)
    deviations: list[Deviation] = field(default_factory=list)

    def frame(self) -> StepFrame:
        return StepFrame(tuple(self.deltas), tuple(self.failed), deviations=tuple(self.deviations))


log = logging.getLogger("kvferry.worker")


class CanaryLog:
    """Logs and counts the results of canary checks."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._largest = 0.0

    def differs(self, event: CanaryChecked) -> bool:
        """Count a result; return whether the received blocks differ from what this node computes.

        Routers must be informed of a difference."""
        self._metrics.canary.checks[event.outcome].inc()
        if event.outcome == "dropped":
            return False
        self._largest = max(self._largest, event.distance)
        self._metrics.canary.largest.set(self._largest)
        if event.outcome == "agreed":
            return False
        self._metrics.canary.deviations.labels(self._metrics.role, event.sender[0]).inc()
        log.warning(
            "blocks that %s sent for %s (%d tokens) differ from what this node computes: distance of logits "
            "%.3g, limit %.3g",
            event.sender[0], event.key[0], event.tokens, event.distance, event.tolerated,
        )  # fmt: skip
        return True
