"""The decode role: grants blocks to prefill nodes, takes over their requests, generates, streams tokens to routers.

It prefills locally what a router asks it to. The receiver calls from the link thread and goes straight to the engine's
inbox; everything else here belongs to the asyncio loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import Request, Response

from decode_worker.streams import RouterStreams, frames
from engine.events import Event, Failed, Generated, ReservationFailed, Reserved
from kv_transfer.ports import TransferKey
from kv_transfer.receiver import Receiver
from node.frames import FrameResponse
from node.pool_memory import PoolMemory
from node.service import Base
from process.http import read_message
from protocol.errors import Cancelled, Draining, KvferryError
from protocol.messages import AttemptFailed, CancelRequest, Commit, GenerateRequest, Job, StepFrame, TokenDelta


class DecodeService:
    """Joins the engine and the receiver of a decode node."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._streams = RouterStreams(self._router_lost)
        self._link = base.link
        self._receiver = Receiver(
            self._link,
            PoolMemory(base.parts.kv),
            _Grants(self, base),
            epoch=base.epoch,
            fingerprint=base.parts.fingerprint,
            verify=base.verify_checksums,
        )
        self._link.start(self._receiver)
        base.app.post("/attempts/generate", status_code=202)(self.post_generate)
        base.app.post("/attempts/cancel", status_code=202)(self.post_cancel)
        base.app.get("/streams/{router_id}")(self.get_stream)

    async def post_generate(self, request: Request) -> None:
        """Prefill an attempt locally and generate; its output goes to the router's stream."""
        self._base.require_ready()
        job = (await read_message(request, GenerateRequest)).job
        self._base.engine.submit(lambda engine: engine.add(job))

    async def post_cancel(self, request: Request) -> None:
        """Drop all attempts of a request up to the given one."""
        cancel = await read_message(request, CancelRequest)
        self._base.engine.submit(lambda engine: engine.cancel(cancel.request_id, cancel.attempt))

    async def get_stream(self, router_id: str) -> Response:
        """The standing token stream of a router."""
        queue = self._streams.open(router_id)
        return FrameResponse(frames(queue), on_close=lambda: self._streams.close(router_id, queue))

    def busy(self) -> bool:
        return bool(self._base.engine.load.open_grants)

    def stop(self) -> None:
        self._streams.stop()
        self._link.stop()

    def on_events(self, events: Sequence[Event]) -> None:
        """News from the engine. What it made for one router goes out as one frame."""
        outputs: defaultdict[str, _Output] = defaultdict(_Output)
        for event in events:
            if isinstance(event, Generated):
                outputs[event.router_id].deltas.append(event.delta)
                if event.delta.finish_reason is not None:
                    self._base.metrics.attempts["done"].inc()
            elif isinstance(event, Failed):
                outputs[event.router_id].failed.append(self._failure(event))
            elif isinstance(event, Reserved):
                self._base.metrics.grants["granted"].inc()
                self._receiver.granted(event.owner, event.first_block, event.block_ids)  # type: ignore[arg-type]
            elif isinstance(event, ReservationFailed):
                self._reservation_failed(event)
        for router_id, output in outputs.items():
            self._streams.publish(router_id, StepFrame(tuple(output.deltas), tuple(output.failed)))

    def _failure(self, event: Failed) -> AttemptFailed:
        self._base.metrics.attempts["cancelled" if event.error.code == "cancelled" else "failed"].inc()
        return AttemptFailed(*event.key, event.error.code, event.error.message)

    def _reservation_failed(self, event: ReservationFailed) -> None:
        key: TransferKey = event.owner  # type: ignore[assignment]
        self._base.metrics.grants["aborted" if event.granted else "refused"].inc()
        if event.granted:
            self._receiver.cancel(key, event.error)
        else:
            self._receiver.refused(key, event.error)

    def _router_lost(self, router_id: str) -> None:
        self._base.engine.submit(lambda engine: engine.cancel_router(router_id))


@dataclass(slots=True)
class _Output:
    """Of one turn of the engine, for one router."""

    deltas: list[TokenDelta] = field(default_factory=list)
    failed: list[AttemptFailed] = field(default_factory=list)


class _Grants:
    """The receiver's questions, on the link thread, for the engine's inbox."""

    def __init__(self, service: DecodeService, base: Base) -> None:
        self._service = service
        self._base = base

    def reserve(self, key: TransferKey, job: Job) -> None:
        try:
            self._base.require_ready()
        except Draining as error:
            self._base.metrics.grants["refused"].inc()
            self._service._receiver.refused(key, error)
            return
        self._base.engine.submit(lambda engine: engine.reserve(key, job))

    def ready(self, key: TransferKey, commit: Commit) -> None:
        metrics, block_bytes = self._base.metrics, self._base.parts.layout.block_bytes
        metrics.ships["done"].inc()
        metrics.ship_bytes.inc(commit.block_count * block_bytes)
        self._base.engine.submit(lambda engine: engine.start(key, commit.first))

    def failed(self, key: TransferKey, error: KvferryError) -> None:
        outcome = "aborted" if isinstance(error, Cancelled) else "failed"
        self._base.metrics.ships[outcome].inc()
        self._base.engine.submit(lambda engine: engine.withdraw(key, error))

    def quiet(self, key: TransferKey) -> None:
        self._base.engine.submit(lambda engine: engine.grant_quiet(key))
